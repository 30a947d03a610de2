"""Images: patches, crops, mixing, pictures."""
