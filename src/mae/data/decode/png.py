"""PNGs of 16 bits that have colours or alpha, of which Pillow keeps 8: read by imagecodecs."""

import logging

import numpy as np
from jaxtyping import UInt16

BITS = 24
"""Where a PNG says how many bits a sample has; the kind of its colours stands behind."""
_CHANNELS = {2: 3, 4: 2, 6: 4}
_SILENT = logging.NullHandler()  # keeps warnings about odd colour profiles, one a reading, off the terminal


def deep_channels(data: bytes) -> int:
    """Channels of such a file's pixels, a band of alpha among them; 0 for any other file."""
    deep = data.startswith(b"\x89PNG") and data[BITS : BITS + 1] == b"\x10"
    return _CHANNELS.get(data[BITS + 1], 0) if deep else 0


def read_deep(data: bytes) -> UInt16[np.ndarray, "H W C"]:
    """All channels of such a file as they stand in it; a transparent colour becomes a fourth one.

    Raises:
        imagecodecs.PngError: a truncated or broken file.
    """
    import imagecodecs

    logging.getLogger(imagecodecs.__name__).addHandler(_SILENT)  # once: the same handler is not added again
    pixels: np.ndarray = imagecodecs.png_decode(data)
    return pixels
