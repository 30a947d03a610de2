"""From files on a disk to batches: decoding, sources, augmentation, image sets and loaders."""
