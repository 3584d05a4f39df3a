"""The client: local training of any PyTorch model, and the client half of each rule."""
