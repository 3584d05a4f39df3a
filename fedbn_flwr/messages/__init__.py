"""The content of messages between server and clients: config keys, arrays, and arithmetic on arrays."""
