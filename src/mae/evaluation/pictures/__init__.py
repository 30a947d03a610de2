"""Pictures of images that a user gives: reconstructions, neighbours."""
