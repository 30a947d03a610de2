"""What a run will take: time and memory."""
