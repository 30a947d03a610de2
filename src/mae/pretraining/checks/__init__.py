"""Checks that a run can learn, before it spends hours."""
