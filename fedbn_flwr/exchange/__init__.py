"""FedTAN's exchange, on server and client: batch norm over the batches of all clients."""
