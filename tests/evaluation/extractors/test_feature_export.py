"""Feature files: read back by the libraries they are meant for, whole or absent."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from mae.errors import MAEError, UsageError
from mae.evaluation.extractors import export as feature_files
from mae.evaluation.extractors.export import check_target, write_features

SUFFIXES = [".parquet", ".npz", ".safetensors"]
NAMES = ["a.jpg", "sub/é 猫.png", "bad\udcff.tif", 'quote"\n\\.png', "\ud800"]
SAFE = ["a.jpg", "sub/é 猫.png", "bad\\udcff.tif", 'quote"\n\\.png', "\\ud800"]
SIZES = torch.tensor([[10, 20], [30, 40], [5, 5], [1, 70000], [7, 8]])
GENERATOR = np.random.default_rng(0)
ARRAYS = {
    "mean": GENERATOR.standard_normal((5, 6), dtype=np.float32),
    "patches": GENERATOR.standard_normal((5, 4, 3), dtype=np.float32),
}
ABOUT = {"model": "base é", "pooling": "mean"}


def write(path: Path, **changed) -> None:
    write_features(path, **{"names": NAMES, "sizes": SIZES, "arrays": ARRAYS, "about": ABOUT, **changed})


def read(path: Path) -> tuple[list[str], np.ndarray, dict[str, np.ndarray], dict[str, str]]:
    """Names, sizes, arrays and what is said about them, by the library of the format."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        metadata = {key.decode(): json.loads(value) for key, value in table.schema.metadata.items()}
        arrays = {
            name: np.array(table[name].to_pylist(), table.schema.field(name).type.value_type.to_pandas_dtype()).reshape(
                -1, *shape
            )
            for name, shape in metadata["shapes"].items()
        }
        sizes = np.stack([table["height"].to_numpy(), table["width"].to_numpy()], axis=1)
        return table["name"].to_pylist(), sizes, arrays, metadata["about"]
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        return arrays.pop("names").tolist(), arrays.pop("sizes"), arrays, about
    with safe_open(path, framework="np") as file:
        about = dict(file.metadata())
    arrays = load_file(path)
    return json.loads(about.pop("names")), arrays.pop("sizes"), arrays, about


def same(path: Path, arrays=ARRAYS) -> None:
    names, sizes, found, about = read(path)
    assert (names, about) == (SAFE, ABOUT)
    assert sizes.dtype == np.int64 and np.array_equal(sizes, SIZES.numpy())
    assert sorted(found) == sorted(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array, equal_nan=True)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_half_precision_stays_half_precision(tmp_path, suffix):
    # three dimensions of odd length: what follows must lie on its own boundary all the same
    arrays = {"patches": ARRAYS["patches"][:, :3].astype(np.float16), "mean": ARRAYS["mean"]}
    write(tmp_path / f"f{suffix}", arrays=arrays)
    same(tmp_path / f"f{suffix}", arrays)


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_written_is_read_back(tmp_path, monkeypatch, suffix, chunk):
    monkeypatch.setattr(feature_files, "_CHUNK_BYTES", chunk)
    path = tmp_path / "new" / "deep" / f"f{suffix}"
    write(path)
    same(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_views_and_mapped_files_are_read_in_their_own_order(tmp_path, suffix):
    mapped = np.lib.format.open_memmap(tmp_path / "m.npy", "w+", np.float32, (5, 4, 3))
    mapped[:] = ARRAYS["patches"]
    mapped[2, 1, 0] = np.nan
    arrays = {"patches": mapped, "turned": np.asfortranarray(ARRAYS["mean"]), "strided": ARRAYS["patches"][:, ::2, 1:]}
    write(tmp_path / f"f{suffix}", arrays=arrays, sizes=SIZES.t().contiguous().t())
    same(tmp_path / f"f{suffix}", arrays)


def test_parquet_is_written_a_few_rows_at_a_time_in_lists_of_fixed_length(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_files, "_CHUNK_BYTES", 2 * 4 * (6 + 12))
    write(tmp_path / "f.parquet")
    file = pq.ParquetFile(tmp_path / "f.parquet")
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [2, 2, 1]
    kinds = {field.name: str(field.type) for field in file.schema_arrow}
    assert kinds["name"] == "string" and kinds["height"] == kinds["width"] == "int64"
    assert kinds["mean"].endswith("[6]") and kinds["patches"].endswith("[12]") and "float" in kinds["mean"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_stays_bounded(tmp_path, suffix):
    # A sparse mapped file of 360 MB, and no more than 200 MB of memory beyond what the imports take.
    code = f"""
import resource, torch, numpy as np, psutil, pyarrow, pyarrow.parquet
from pathlib import Path
from mae.evaluation.extractors.export import write_features
data = np.memmap({str(tmp_path / "m.bin")!r}, np.float32, "w+", shape=(600, 150_000))
used = psutil.Process().memory_info()
resource.setrlimit(resource.RLIMIT_DATA, (used.data + (200 << 20),) * 2)
write_features(Path({str(tmp_path / "f")!r} + {suffix!r}), names=[str(i) for i in range(600)],
               sizes=torch.ones(600, 2, dtype=torch.long), arrays={{"patches": data}}, about={{}})
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failure_on_the_way_leaves_nothing(tmp_path, suffix):
    arrays = {"mean": GENERATOR.standard_normal((5, 100_000), dtype=np.float32)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a limit on the size of files stands for the full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
        with pytest.raises(MAEError, match="cannot write the features .*: File too large"):
            write(tmp_path / f"f{suffix}", arrays=arrays)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_existing_file_is_kept(tmp_path, suffix):
    (tmp_path / f"f{suffix}").write_bytes(b"old")
    for refused in (write, check_target):
        with pytest.raises(UsageError, match="exists and is not overwritten"):
            refused(tmp_path / f"f{suffix}")
    assert (tmp_path / f"f{suffix}").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["f.tsv", "f", "f.npy"])
def test_another_suffix_is_refused_and_the_formats_are_named(tmp_path, name):
    for refused in (write, check_target):
        with pytest.raises(UsageError, match=r"\.parquet, \.npz, \.safetensors"):
            refused(tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arrays": {"mean": ARRAYS["mean"].astype(np.float64)}}, r"'mean' is float64 of shape \[5, 6\]"),
        ({"arrays": {"mean": ARRAYS["mean"][:4]}}, r"of shape \[4, 6\]; expected float32 or float16 of shape \[5, D\]"),
        ({"arrays": {"mean": ARRAYS["mean"][:, 0]}}, r"of shape \[5\]"),
        ({"arrays": {"mean": ARRAYS["mean"][:, :0]}}, r"of shape \[5, 0\]"),
        ({"arrays": {"sizes": ARRAYS["mean"]}}, "cannot be called 'sizes'"),
        ({"arrays": {}}, "0 arrays"),
        ({"names": NAMES[:4]}, "5 sizes came with 4 names"),
        ({"names": [], "sizes": SIZES[:0]}, "0 images"),
        ({"about": {"names": "x"}}, "cannot hold 'names'"),
    ],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_does_not_fit_together_is_refused(tmp_path, suffix, changed, message):
    with pytest.raises(UsageError, match=message):
        write(tmp_path / "new" / f"f{suffix}", **changed)
    assert list(tmp_path.iterdir()) == []


def test_more_names_than_a_safetensors_header_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_files, "_MAX_HEADER_BYTES", 200)
    with pytest.raises(UsageError, match=r"names of 5 images need .* write \.parquet or \.npz"):
        write(tmp_path / "f.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is not a folder; give another name"):
        write(tmp_path / "file" / "f.npz")


def test_pyarrow_is_not_imported_before_it_is_needed():
    code = "import sys, mae.evaluation.extractors.export; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
