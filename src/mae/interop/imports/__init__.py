"""Weights from elsewhere, read safely and verified."""
