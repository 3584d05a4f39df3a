"""The server: the way of a round, the hooks of strategies, and what its innermost strategy adds."""
