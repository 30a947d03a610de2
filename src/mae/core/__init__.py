"""The shared types, the contracts and the configuration: read these first."""
