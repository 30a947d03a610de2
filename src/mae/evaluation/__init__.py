"""What was learned, by the field's protocols: one a file."""
