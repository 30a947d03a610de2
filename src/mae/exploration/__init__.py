"""A run, looked into: what it learned of its images, on one page."""
