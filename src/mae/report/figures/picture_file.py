"""Write one picture to a file, in the dtype of the image it was made from."""

import io
from pathlib import Path

import numpy as np
import tifffile
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from mae.report.figures.canvas import whole_file


def write_picture(picture: Float[Tensor, "C H W"], path: Path, *, dtype: np.dtype) -> Path:
    """Write a PNG if it can hold the dtype and the channels, else a TIFF.

    Args:
        picture: values; for integer dtypes scaled to [0, 1] and clipped.
        path: of the PNG; a TIFF gets the suffix `.tif`. An older file is replaced atomically.
        dtype: uint8, uint16 or float32.

    Returns:
        The written file.

    Raises:
        MAEError: the file cannot be written.
    """
    values = picture.permute(1, 2, 0).numpy()
    if dtype.kind == "u":
        top = np.iinfo(dtype).max
        values = np.rint(values * top).clip(0, top).astype(dtype)
    channels = values.shape[2]
    is_png = (dtype == np.uint8 and channels in (1, 3)) or (dtype == np.uint16 and channels == 1)
    content = io.BytesIO()
    if is_png:
        Image.fromarray(values[..., 0] if channels == 1 else values).save(content, "PNG")
    else:
        tifffile.imwrite(content, values, photometric="rgb" if channels == 3 else "minisblack", planarconfig="contig")
    path = path if is_png else path.with_suffix(".tif")
    with whole_file(path, what="picture") as unfinished:
        unfinished.write_bytes(content.getvalue())
    return path
