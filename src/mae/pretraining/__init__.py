"""From a configuration to a finished run: choose what was left open, build the parts, hand them to the engine."""
