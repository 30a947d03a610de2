"""Weights in from where they are, and out to where they are needed; nothing in the core imports it."""
