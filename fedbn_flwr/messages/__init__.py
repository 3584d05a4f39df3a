"""What travels between server and clients: config keys, arrays, and arithmetic on them."""
