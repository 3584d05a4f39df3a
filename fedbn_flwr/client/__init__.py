"""The client: local training of any PyTorch model, and the client rules."""
