"""What keeps a training alive: guards, signals, agreement of processes."""
