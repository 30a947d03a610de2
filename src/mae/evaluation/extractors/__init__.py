"""Features of frozen encoders, ours and others'."""
