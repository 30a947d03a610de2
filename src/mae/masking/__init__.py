"""Which tokens are hidden: one strategy a file."""
