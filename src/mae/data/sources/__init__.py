"""Where images come from: each source lists names and gives the images by number."""
