"""How fast this machine does what a run does, beside its own limits and beside peers, turn by turn in one process."""
