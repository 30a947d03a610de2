"""Building blocks for any modality: patches, positions, attention, transformer blocks."""
