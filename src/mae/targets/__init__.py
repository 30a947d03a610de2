"""What the decoder must predict."""
