"""Configurations, models, checkpoints and stored features that lie, overflow or hold code."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hostile.corpus import Case, Verdict
from safetensors.torch import save_file

from mae.core.method import MethodConfig
from mae.models.build import build_model
from mae.models.file import model_metadata
from mae.training.checkpoint import commit, stage, take_snapshot
from mae.training.state import TrainingState

SMALL = MethodConfig().override({
    "img_size": (8, 8), "patch_size": (4, 4), "embed_dim": 8, "depth": 1, "num_heads": 2, "decoder_embed_dim": 8,
    "decoder_depth": 1, "decoder_num_heads": 2,
})  # fmt: skip
DEEP = 100_000
"""Brackets inside one another: more than Python calls may be."""

Texts = list[tuple[str, str, Verdict, str]]


def configs() -> Texts:
    """`config.json` of a run."""
    nested = '{"model": ' + "[" * DEEP + "]" * DEEP + "}"
    return [
        ("config", '{"model": "mae_vit_base_patch16", "optim": {"steps": 5}}', "ok", ""),
        ("config nested deeply", nested, "refused", "cannot be read as JSON"),
        ("config nested", '{"model": ' + "[" * 900 + "]" * 900 + "}", "refused", ""),
        ("config of a huge whole number", '{"optim": {"steps": ' + "9" * 4000 + "}}", "either", ""),
        (
            "config of a number without end",
            '{"optim": {"steps": ' + "9" * 99999 + "}}",
            "refused",
            "cannot be read as JSON",
        ),
        ("config of a huge number", '{"optim": {"lr": 1e999}}', "refused", "--lr is inf"),
        ("config of NaN", '{"method": {"mask_ratio": NaN}}', "refused", "mask_ratio is nan"),
        ("config of minus infinity", '{"optim": {"lr": -Infinity}}', "refused", "lr is -inf"),
        ("config of a wrong kind", '{"optim": {"steps": "5"}}', "refused", "option steps is '5'"),
        ("config of a yes that is a number", '{"machine": {"compile": 1}}', "refused", "option compile is 1"),
        ("config of an unknown key", '{"_target_": "os.system"}', "refused", "unknown group of options '_target_'"),
        (
            "config of code",
            '{"model": {"__class__": "os.system", "args": ["true"]}}',
            "refused",
            "model is {'__class__'",
        ),
        ("config of code as a mask", '{"method": {"mask": {"kind": "os.system"}}}', "refused", "unknown mask"),
        (
            "config of a mask from a package",
            '{"method": {"mask": {"kind": "x", "package": "os"}}}',
            "refused",
            "install",
        ),
        ("config of YAML", "model: !!python/object/apply:os.system ['true']", "refused", "cannot be read as JSON"),
        ("config of a long text", json.dumps({"optim": {"steps": "a" * 999_999}}), "refused", "^.{0,400}$"),
        ("config of a long key", json.dumps({"a" * 999_999: 1}), "refused", ""),
        ("config of half a letter", '{"source": "\\ud800"}', "refused", ""),
        ("config of a NUL", '{"machine": {"out": "a\\u0000b"}}', "either", ""),
        ("config of one key twice", '{"optim": {"steps": -1, "steps": 5}}', "ok", ""),
        ("config that is a list", "[]", "refused", "expected a JSON object"),
        ("config that is nothing", "", "refused", "cannot be read as JSON"),
        ("config of other bytes", "\udcff\udcfe{}", "refused", "cannot be read as JSON"),
        ("config of wrong sizes", '{"method": {"img_size": [1, 2, 3]}}', "refused", "img_size is"),
    ]


def image(options: str) -> str:
    """A model's configuration that says so much of its tokenizer."""
    return f'{{"tokenizer": {{"kind": "image", {options}}}}}'


def vit(options: str) -> str:
    """The same of its encoder."""
    return f'{{"encoder": {{"kind": "vit", {options}}}}}'


def model_configs() -> Texts:
    """The configuration of a model."""
    return [
        ("model config of giant sides", image('"img_size": [99999, 99999]'), "refused", "img_size is .99999"),
        ("model config of giant width", vit('"embed_dim": 1000000000000'), "refused", "embed_dim is"),
        (
            "model config of a giant table",
            image('"img_size": [16384, 16384], "patch_size": [1, 1]'),
            "refused",
            "tokens",
        ),
        ("model config of no patch", image('"patch_size": [0, 0]'), "refused", "patch_size is .0"),
        ("model config of NaN", vit('"mlp_ratio": NaN'), "refused", "mlp_ratio is nan"),
        ("model config of a statistic of NaN", image('"mean": [NaN, 0, 0]'), "refused", "finite"),
        ("model config of a std of 0", image('"std": [0, 0, 0]'), "refused", "above 0"),
        ("model config of code", '{"loss": "__import__(\'os\')"}', "refused", "unknown loss"),
        ("model config of a kind that is code", '{"loss": {"kind": "__import__(\'os\')"}}', "refused", "unknown loss"),
        ("model config of half a letter", '{"loss": "\\ud800"}', "refused", ""),
        ("model config of half a letter in a mean", image('"channels": ["\\ud800", "a", "b"]'), "either", ""),
        ("model config of a part that is a list", '{"mask": []}', "refused", "mask is"),
        ("model config of terms that are a number", '{"terms": 3}', "refused", "terms is 3"),
        ("model config of a term twice", '{"terms": [{"kind": "laplacian"}, {"kind": "laplacian"}]}', "either", ""),
    ]


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code was run",)


def model_files(good: bytes) -> list[tuple[str, bytes, Verdict, str]]:
    """Models, made of the file of a good one."""
    size = struct.unpack("<Q", good[:8])[0]
    header, data = json.loads(good[8 : 8 + size]), good[8 + size :]
    name = next(key for key in header if key != "__metadata__")
    told = json.loads(header["__metadata__"]["mae"])

    def changed(**entry: Any) -> bytes:
        return safetensors({**header, name: {**header[name], **entry}}, data)

    def claiming(record: Any) -> bytes:
        text = record if isinstance(record, str) else json.dumps(record)
        return safetensors({**header, "__metadata__": {"mae": text}}, data)

    def configured(part: str, **options: Any) -> bytes:
        config = told["config"]
        return claiming({**told, "config": {**config, part: {**config[part], **options}}})

    not_finite = bytearray(data)
    not_finite[:4] = struct.pack("<f", float("nan"))
    return [
        ("model", good, "ok", "weights"),
        ("model that is a pickle", pickle.dumps(_Code()), "refused", "safetensors"),
        ("model of a giant header", safetensors(header, data, length=1 << 40), "refused", "safetensors"),
        ("model of a header without end", safetensors(header, data, length=2**64 - 1), "refused", "safetensors"),
        ("model of a header of words", safetensors(b"words" * 9, data), "refused", "safetensors"),
        ("model nested deeply", safetensors(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"), "refused", "safetensors"),
        ("model of a tensor outside", changed(data_offsets=[0, 1 << 50]), "refused", "safetensors"),
        ("model of a tensor backwards", changed(data_offsets=[8, 0]), "refused", "safetensors"),
        ("model of a tensor below 0", changed(data_offsets=[-8, 0]), "refused", "safetensors"),
        ("model of a giant shape", changed(shape=[1 << 62, 4]), "refused", "safetensors"),
        ("model of another shape", changed(shape=[*header[name]["shape"], 1]), "refused", "expected"),
        ("model of another type", changed(dtype="I32"), "refused", "expected"),
        ("model of an unknown type", changed(dtype="OBJECT"), "refused", "safetensors"),
        ("model of overlapping tensors", _overlapping(header, data), "refused", "safetensors"),
        ("model of too few bytes", good[:-4], "refused", "safetensors"),
        ("model of too many bytes", good + bytes(64), "refused", "safetensors"),
        ("model cut in its header", good[: size // 2], "refused", "safetensors"),
        ("model of nothing", b"", "refused", "safetensors"),
        ("model without a word", safetensors({k: v for k, v in header.items() if k != "__metadata__"}, data),
         "refused", "header"),
        ("model of no JSON", claiming("{"), "refused", "header"),
        ("model of JSON nested deeply", claiming("[" * DEEP + "]" * DEEP), "refused", "header"),
        ("model of another format", claiming({**told, "format": 99}), "refused", "format 99"),
        ("model of a list", claiming([]), "refused", "header"),
        ("model of unknown options", configured("mask", code="os.system"), "refused", "unknown"),
        ("model of giant options", configured("encoder", depth=256, embed_dim=16384), "refused", ""),
        ("model of other options", configured("encoder", embed_dim=16), "refused", "expected"),
        ("model of a pending decoder", configured("decoder", depth=3), "refused", "missing"),
        ("model of widths that do not divide", configured("encoder", num_heads=3), "refused", ""),
        ("model of a giant table", configured("tokenizer", img_size=[16384, 16384], patch_size=[4, 4]), "refused", ""),
        ("model of an extra tensor", safetensors({**header, "extra": {"dtype": "F32", "shape": [0],
         "data_offsets": [len(data), len(data)]}}, data), "refused", "extra"),
        ("model of NaN", safetensors(header, bytes(not_finite)), "refused", "not finite"),
    ]  # fmt: skip


def write_small(path: Path) -> Path:
    """A small model in a file."""
    torch.manual_seed(0)
    model = build_model(SMALL)
    save_file(model.state_dict(), path, metadata=model_metadata(model))
    return path


def _overlapping(header: dict[str, Any], data: bytes) -> bytes:
    first, second = [key for key in header if key != "__metadata__"][:2]
    return safetensors({**header, second: header[first]}, data)


def cases(folder: Path) -> list[Case]:
    """All of the above as files, checkpoints and stored features as folders."""
    found: list[Case] = []

    def add(name: str, path: Path, reader: str, verdict: Verdict, why: str) -> None:
        found.append(Case(name=name, path=path, reader=reader, verdict=verdict, why=why))

    for reader, texts in (("config", configs()), ("model config", model_configs())):
        for number, (name, text, verdict, why) in enumerate(texts):
            path = folder / f"{reader} {number}.json"
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
            add(name, path, reader, verdict, why)
    good = write_small(folder / "good.safetensors")
    for number, (name, data, verdict, why) in enumerate(model_files(good.read_bytes())):
        path = folder / f"model {number}.safetensors"
        path.write_bytes(data)
        add(name, path, "model", verdict, why)
    for name, path, verdict, why in [*_checkpoints(folder), *_features(folder)]:
        add(name, path, "checkpoint" if name.startswith("checkpoint") else "features", verdict, why)
    return found


def _checkpoints(folder: Path) -> list[tuple[str, Path, Verdict, str]]:
    model = build_model(SMALL)
    optimizer = torch.optim.AdamW(model.parameters())

    def written(number: int) -> Path:
        place = folder / f"checkpoint {number}"
        state = TrainingState(step=1, samples=1, seconds=0.0, scaler={}, rolled_back_at=None, identity={})
        stage(place, take_snapshot(model, optimizer), state=state, metadata={})
        return commit(place, 1)

    found: list[tuple[str, Path, Verdict, str]] = [("checkpoint", written(0), "ok", "")]
    told = json.loads((found[0][1] / "manifest.json").read_text())
    files = told["files"]
    manifests = {
        "of another size": json.dumps({**told, "files": {**files, "state.json": {"bytes": 1, "sha256": "0" * 64}}}),
        "that leaves one out": json.dumps({**told, "files": {"state.json": files["state.json"]}}),
        "of names outside": json.dumps({**told, "files": {f"../../{name}": value for name, value in files.items()}}),
        "of a list": json.dumps({"files": []}),
        "of a number": "7",
        "of nothing": "",
        "of other bytes": "\udcff",
        "nested deeply": "[" * DEEP + "]" * DEEP,
    }
    for number, (name, text) in enumerate(manifests.items(), start=1):
        path = written(number)
        (path / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        found.append((f"checkpoint with a manifest {name}", path, "refused", ""))
    path = written(99)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("/dev/zero")
    found.append(("checkpoint of a device", path, "refused", ""))
    return found


def _features(folder: Path) -> list[tuple[str, Path, Verdict, str]]:
    giant = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 4), }".ljust(118) + b"\n"
    header = b"\x93NUMPY\1\0" + struct.pack("<H", len(giant)) + giant
    stores: dict[str, tuple[Any, bytes | np.ndarray, Verdict]] = {
        "features": ({"arrays": ["x"]}, np.ones((3, 2), np.float32), "ok"),
        "features of a giant shape": ({"arrays": ["x"]}, header, "refused"),
        "features of objects": ({"arrays": ["x"]}, np.array([{}], dtype=object), "refused"),
        "features of text": ({"arrays": ["x"]}, np.array(["text"]), "refused"),
        "features of words": ({"arrays": ["x"]}, b"words", "refused"),
        "features without names": ({}, b"", "refused"),
        "features named by a number": ({"arrays": 7}, b"", "refused"),
        "features named by a NUL": ({"arrays": ["\0"]}, b"", "refused"),
        "features nested deeply": ("[" * DEEP + "]" * DEEP, b"", "refused"),
    }
    found: list[tuple[str, Path, Verdict, str]] = []
    for name, (key, array, verdict) in stores.items():
        path = folder / name
        path.mkdir()
        (path / "key.json").write_text(key if isinstance(key, str) else json.dumps(key))
        if isinstance(array, bytes):
            (path / "x.npy").write_bytes(array)
        else:
            np.save(path / "x.npy", array, allow_pickle=True)
        found.append((name, path, verdict, ""))
    return found
