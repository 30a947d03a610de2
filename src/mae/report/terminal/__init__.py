"""Tables and progress on a terminal."""
