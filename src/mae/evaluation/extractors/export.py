"""Features of many images in one file that other programs read: CSV, Parquet, NumPy or safetensors."""

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO
from zipfile import ZipFile

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from mae.errors import MAEError, UsageError
from mae.records import check_new

_CHUNK_BYTES = 16 << 20  # of the arrays in memory at a time
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses to read more
_RESERVED = ("name", "height", "width", "names", "sizes", "about")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Features:
    names: list[str]
    sizes: np.ndarray
    arrays: Mapping[str, np.ndarray]
    about: Mapping[str, str]


def write_features(
    path: Path,
    *,
    names: Sequence[str],
    sizes: Int64[Tensor, "n 2"],
    arrays: Mapping[str, np.ndarray],
    about: Mapping[str, str],
) -> None:
    """Write features, a row an image in the order given, in the format that the file's suffix names.

    - `.parquet`: columns `name`, `height`, `width` and one of fixed-size lists for each array. The schema's
      metadata hold `about` and `shapes`, the shape of an image's values in each array, as JSON.
    - `.csv`: a row an image; columns `name`, `height`, `width` and one for each value, `cls_0` and so on, to be read by
      anything and several times as large. What a model was is not in it. No patch tokens.
    - `.npz`: `names` (text), `sizes [n, 2]`, each array, and `about` as JSON text. Read it with
      `numpy.load(path, allow_pickle=False)`. Every name takes the room of the longest one, 4 bytes a character.
    - `.safetensors`: `sizes [n, 2]` and each array; the metadata hold `about`'s entries and `names` as JSON. The
      format allows a header of 100 MB, about a million names of 90 characters.

    The arrays are read some rows at a time, so they may be memory-mapped and larger than the memory. Bytes of a
    name that are no text are written as `\\udcXX`.

    Args:
        path: must not exist; its folder is made.
        names: one an image.
        sizes: height and width of each image in pixels.
        arrays: by name, float32 or float16, `[n, D]` or `[n, N, D]`.
        about: what a reader must know, such as the model and how its images are made.

    Raises:
        UsageError: another suffix, a file that exists, or arrays of another kind or number of rows.
        MAEError: the file cannot be written; nothing is left of it.
    """
    check_target(path)
    _check(names, sizes, arrays, about)
    # Undecodable bytes of a file name come as halves of surrogate pairs, which no format can hold.
    features = _Features(
        names=[name.encode("utf-8", "backslashreplace").decode() for name in names],
        sizes=np.ascontiguousarray(sizes.cpu().numpy()),
        arrays=arrays,
        about={key: value.encode("utf-8", "backslashreplace").decode() for key, value in about.items()},
    )
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            _WRITERS[path.suffix.lower()](file, features)
        aside.rename(path)
    except OSError as error:
        raise MAEError(f"cannot write the features {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # gone after a success, and a full disk must not hide the first error
            aside.unlink()


def check_target(path: Path, *, tokens: str | None = None) -> None:
    """Refuse a file that `write_features` would refuse, before there is anything to write.

    Args:
        path: the file.
        tokens: the feature of many tokens that is to be in it; None: there is none.

    Raises:
        UsageError: a suffix that is none of the formats', or has no place for tokens; or a file that exists.
    """
    if path.suffix.lower() not in _WRITERS:
        raise UsageError(f"features cannot be written as {path.name!r}; end its name with {', '.join(_WRITERS)}")
    if tokens is not None and path.suffix.lower() == ".csv":
        raise _no_place(tokens)
    check_new(path)


def _no_place(tokens: str) -> UsageError:
    return UsageError(f"a .csv has no place for {tokens} of many tokens; write .parquet, .npz or .safetensors")


def _check(names: Sequence[str], sizes: Tensor, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    if not names or not arrays:
        raise UsageError(f"{len(names)} images with {len(arrays)} arrays leave nothing to write; give at least one")
    if len(sizes) != len(names):
        raise UsageError(f"{len(sizes)} sizes came with {len(names)} names; each image needs one")
    for name, array in arrays.items():
        if name in _RESERVED:
            raise UsageError(f"an array cannot be called {name!r}: the file uses {', '.join(_RESERVED)} itself")
        if array.dtype not in _KINDS or array.ndim not in (2, 3) or len(array) != len(names) or array.size == 0:
            raise UsageError(
                f"array {name!r} is {array.dtype} of shape {list(array.shape)}; expected float32 or float16 of shape "
                f"[{len(names)}, D] or [{len(names)}, N, D], an entry for each name"
            )
    if "names" in about:
        raise UsageError("'about' cannot hold 'names': a safetensors file keeps the images' names there")


def _row_chunks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // row_bytes)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _write_parquet(file: IO[bytes], features: _Features) -> None:
    import pyarrow as pa  # here: slow to import, and needed for this format alone
    import pyarrow.parquet as pq

    arrays = features.arrays
    lengths = {name: prod(array.shape[1:]) for name, array in arrays.items()}
    columns = [pa.field("name", pa.string()), pa.field("height", pa.int64()), pa.field("width", pa.int64())]
    columns += [
        pa.field(name, pa.list_(pa.from_numpy_dtype(arrays[name].dtype), length)) for name, length in lengths.items()
    ]
    shapes = {name: array.shape[1:] for name, array in arrays.items()}
    schema = pa.schema(columns, {"about": json.dumps(dict(features.about)), "shapes": json.dumps(shapes)})
    with pq.ParquetWriter(file, schema, use_dictionary=False) as writer:
        for rows in _row_chunks(len(features.names), 4 * sum(lengths.values())):
            height, width = features.sizes[rows].T.copy()
            lists = [
                pa.FixedSizeListArray.from_arrays(pa.array(array[rows].reshape(-1)), lengths[name])
                for name, array in arrays.items()
            ]
            named = [pa.array(features.names[rows], pa.string()), pa.array(height), pa.array(width)]
            writer.write_table(pa.Table.from_arrays([*named, *lists], schema=schema))


def _write_csv(file: IO[bytes], features: _Features) -> None:
    if tokens := [name for name, array in features.arrays.items() if array.ndim == 3]:
        raise _no_place(tokens[0])
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    rows = csv.writer(text, lineterminator="\n")
    columns = [f"{name}_{place}" for name, array in features.arrays.items() for place in range(array.shape[1])]
    rows.writerow(["name", "height", "width", *columns])
    for chunk in _row_chunks(len(features.names), 4 * len(columns)):
        values = np.concatenate([array[chunk].astype(str) for array in features.arrays.values()], axis=1)
        sizes = features.sizes[chunk]
        for name, size, row in zip(features.names[chunk], sizes.tolist(), values.tolist(), strict=True):
            rows.writerow([name, *size, *row])
    text.detach()


def _write_npz(file: IO[bytes], features: _Features) -> None:
    about = np.array(json.dumps(dict(features.about)))
    entries = {"names": np.array(features.names), "sizes": features.sizes, **features.arrays, "about": about}
    with ZipFile(file, "w") as archive:
        for name, array in entries.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)


def _write_safetensors(file: IO[bytes], features: _Features) -> None:
    widest_first = sorted(features.arrays.items(), key=lambda item: -item[1].itemsize)  # so that all stay aligned
    tensors = {"sizes": features.sizes.astype("<i8"), **dict(widest_first)}
    header: dict[str, object] = {
        "__metadata__": {**features.about, "names": json.dumps(features.names, ensure_ascii=False)}
    }
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        kind = "I64" if name == "sizes" else _KINDS[tensor.dtype]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise UsageError(
            f"the names of {len(features.names):,} images need {len(text):,} bytes, more than the "
            f"{_MAX_HEADER_BYTES:,} of a safetensors header; write .parquet or .npz"
        )
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        for rows in _row_chunks(len(tensor), tensor.nbytes // len(tensor)):
            file.write(tensor[rows].astype(tensor.dtype.newbyteorder("<")).tobytes())


_KINDS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
_WRITERS: dict[str, Callable[[IO[bytes], _Features], None]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
}
