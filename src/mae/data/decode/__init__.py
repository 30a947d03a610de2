"""From the bytes of a file to an array, within bounds."""
