"""A source as the images of one run: one type, the same channels, checked statistics."""
