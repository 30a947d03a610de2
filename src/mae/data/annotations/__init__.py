"""What people drew on their images: the class of each pixel."""
