"""Weights for elsewhere, written and verified."""
