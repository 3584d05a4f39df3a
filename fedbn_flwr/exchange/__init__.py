"""FedTAN's exchange, both ends: batch norm over the batches of all clients."""
