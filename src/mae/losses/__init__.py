"""Terms of the objective: one a file."""
