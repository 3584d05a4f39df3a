"""Which client has which images."""
