"""The version, in a file of its own so that packaging can read it."""

__version__ = "0.1.0"
