"""From a dataset to batches on a device, in a keyed order."""
