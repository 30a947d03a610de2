"""Files from outside may hold anything: what is no weights is refused, and nothing in it is ever executed."""

import argparse
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import HEADS, as_checkpoint, official, saved
from safetensors.torch import save_file
from tiny import tiny_model
from torch import Tensor

from mae.errors import MAEError, UsageError
from mae.interop.imports import sidecar
from mae.interop.imports.convert import WeightMetadata
from mae.interop.imports.load import load_external
from mae.interop.imports.reading import read_external

TOLD = WeightMetadata(**HEADS, norm_pix_loss=True)


class Payload:
    """Unpickled by a careless reader, this writes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return official(tiny_model(img_size=16))


HIDDEN: dict[str, Callable[[dict[str, Tensor], Payload], Any]] = {
    "beside the tensors": lambda tensors, payload: {**tensors, "extra": payload},
    "beside the state": lambda tensors, payload: {"model": tensors, "hooks": payload},
    "among the options": lambda tensors, payload: as_checkpoint(tensors, norm_pix_loss=True, evil=payload),
    "as the whole": lambda tensors, payload: payload,
    "as a name": lambda tensors, payload: {**tensors, payload: 1},
}


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "before 2020"])
@pytest.mark.parametrize("where", HIDDEN)
def test_a_payload_is_never_executed(where: str, legacy: bool, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "w.pth"
    torch.save(HIDDEN[where](tensors, Payload(canary)), path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(MAEError, match=r"holds Python objects besides its tensors \((posix|nt).system\)"):
        read_external(path)
    assert not canary.exists()


def test_the_canary_would_sing(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.load(saved(tmp_path / "w.pth", {**tensors, "extra": Payload(canary)}), weights_only=False)
    assert canary.exists()


def test_options_of_the_official_code_and_no_other_class_are_read(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", as_checkpoint(tensors, norm_pix_loss=True, input_size=16, model="mae"))
    assert read_external(path).options == {"norm_pix_loss": True, "input_size": 16, "model": "mae"}
    inner = argparse.Namespace(path=Path("/somewhere"))
    with pytest.raises(MAEError, match="pathlib"):
        read_external(saved(tmp_path / "v.pth", {"model": tensors, "args": inner}))
    with pytest.raises(Exception, match="Unsupported global"):  # nor does reading leave the class allowed
        torch.load(path, weights_only=True)


def test_usual_keys_are_read(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    beside = {(1, ("a", 2)): (3, tuple(map(str, range(1000)))), "betas": [(0.9, 0.95)] * 2000, 5: {(): ((),)}}
    assert read_external(saved(tmp_path / "w.pth", {"model": tensors, "meta": beside})).tensors.keys() == tensors.keys()


def safetensors(path: Path, header: str | bytes, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
MANY = json.dumps({"one": {**EMPTY, "shape": [1], "data_offsets": [0, 4]}, **{str(n): EMPTY for n in range(20_000)}})
ENTRY = '"patch_embed.proj.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'


@pytest.mark.parametrize(
    ("header", "length", "says"),
    [
        ("{" + ENTRY + ", " + ENTRY + "}", None, "says 'patch_embed.proj.weight' twice"),
        ("{", 1 << 40, "header claims 1,099,511,627,776 bytes"),
        ("{" + ENTRY.replace("[0, 4]", "[0, 4000]") + "}", None, "cannot be read as a safetensors file"),
        ("{" + ENTRY.replace("[1]", "[4611686018427387904]") + "}", None, "cannot be read as a safetensors file"),
        ('{"a": ' * 2000, None, "no valid JSON"),
        ("{" + ENTRY.replace("[1]", str([1] * 65)) + "}", None, "more than 64 axes"),
        (MANY, None, "holds 20,001 tensors; at most 20,000 are read"),
    ],
    ids=["twice", "huge", "beyond the end", "huge shape", "deep", "axes", "many"],
)
def test_hostile_safetensors_are_refused(header: str, length: int | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(MAEError, match=says):
        read_external(safetensors(tmp_path / "w.safetensors", header, bytes(4), length=length))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a weights file"),
        (b"hello world", "is not a weights file; expected safetensors or a file of torch.save"),
        (b"PK\3\4 and nothing more", "cannot be read"),
        (b"\x80\x04 and nothing more", "cannot be read"),
        (pickle.dumps({"a": 1}), "cannot be read"),
        (pickle.dumps(list(range(100000)))[:5000], "cannot be read"),
    ],
    ids=["empty", "text", "zip", "pickle", "plain pickle", "cut pickle"],
)
def test_what_is_no_weights_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises((UsageError, MAEError), match=says):
        read_external(tmp_path / "w.pth")


@pytest.mark.parametrize(
    "content",
    [[1, 2], {"model": {"a": 1}}, {"epoch": 3}, {}, torch.zeros(3)],
    ids=["list", "no", "epoch", "none", "one"],
)
def test_a_checkpoint_without_tensors_by_name_says_what_it_holds(content: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no recognisable weights"):
        read_external(saved(tmp_path / "w.pth", content))


def test_a_cut_file_is_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", tensors)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(MAEError, match="cannot be read"):
        read_external(path)


def test_values_that_are_not_finite_are_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors["blocks.0.norm1.weight"] = torch.full((24,), float("nan"))
    with pytest.raises(MAEError, match=r"'blocks.0.norm1.weight' holds values that are not finite"):
        read_external(saved(tmp_path / "w.pth", tensors))


def test_values_beyond_float32_are_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors["mask_token"] = torch.full((1, 1, 16), 1e300, dtype=torch.float64)
    with pytest.raises(MAEError, match=r"'mask_token' holds values that are not finite"):
        read_external(saved(tmp_path / "w.pth", tensors))


def test_numbers_of_four_bits_are_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    four = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(MAEError, match=r"'norm.weight' has dtype torch.float4_e2m1fn_x2; expected floating point"):
        read_external(saved(tmp_path / "w.pth", {**tensors, "norm.weight": four}))


WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "kernel of rank 2": ({"patch_embed.proj.weight": torch.zeros(24, 48)}, "no known vision transformer"),
    "kernel of another width": ({"patch_embed.proj.weight": torch.zeros(25, 3, 4, 4)}, "cls_token has shape"),
    "positions of rank 2": ({"pos_embed": torch.zeros(17, 24)}, r"pos_embed has shape \(17, 24\)"),
    "positions of no grid": ({"pos_embed": torch.zeros(1, 14, 24)}, "not a square number"),
    "positions of another width": ({"pos_embed": torch.zeros(1, 17, 20)}, "expected"),
    "no positions": ({"pos_embed": None}, "holds no pos_embed"),  # type: ignore[dict-item]
    "a block of another shape": (
        {"blocks.1.attn.proj.weight": torch.zeros(24, 25)},
        "encoder.blocks.1.attn.proj.weight has",
    ),
    "a scalar": ({"blocks.0.mlp.fc1.weight": torch.tensor(1.0)}, "expected a tensor of rank 2"),
    "a gap among the blocks": ({"blocks.7.norm1.weight": torch.ones(24)}, "not numbered from 0 without"),
    "a block of a strange name": ({"blocks.x.norm1.weight": torch.ones(24)}, "not numbered from 0 without"),
    "another grid in the decoder": (
        {"decoder_pos_embed": torch.zeros(1, 10, 16)},
        "position embedding for a grid of 4x4",
    ),
    "other MLPs in the decoder": ({"decoder_blocks.0.mlp.fc1.weight": torch.zeros(40, 16)}, "MLP ratio of 2.5"),
    "an empty tensor": ({"patch_embed.proj.weight": torch.zeros(24, 0, 4, 4)}, "is sparse, quantised or empty"),
}


@pytest.mark.parametrize("what", WRONG)
def test_shapes_that_fit_no_model_are_refused(what: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    changed, says = WRONG[what]
    kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
    with pytest.raises((MAEError, UsageError), match=says) as caught:
        load_external(saved(tmp_path / "w.pth", kept), metadata=TOLD, photo_check=False)
    assert "w.pth" in str(caught.value)


def test_a_view_that_claims_more_than_the_file_has_is_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", tensors | {"blocks.0.mlp.fc1.weight": torch.zeros(1).expand(1 << 20, 1 << 20)})
    assert path.stat().st_size < 1 << 20
    with pytest.raises(MAEError, match=r"claims 4,398,0\d\d,\d\d\d,\d\d\d bytes of tensors, far more than its size"):
        read_external(path)


@pytest.mark.parametrize("kind", [torch.zeros(4, 4).to_sparse(), torch.zeros(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_plain_values_is_refused(kind: Tensor, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(MAEError, match=r"tensor 'extra' is sparse, quantised or empty"):
        read_external(saved(tmp_path / "w.pth", tensors | {"extra": kind}))


def test_an_archive_behind_a_pickle_changes_nothing(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path, appended = tmp_path / "w.pth", tmp_path / "b.zip"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(appended, "w") as archive:
        archive.writestr("a/data.pkl", b"x")
    path.write_bytes(path.read_bytes() + appended.read_bytes())
    assert read_external(path).tensors.keys() == tensors.keys()


def test_of_the_options_numbers_alone_are_taken(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    strange = as_checkpoint(tensors, norm_pix_loss={"a": [1]}, mask_ratio=[[0.5]], input_size="x" * 100)
    model, _ = load_external(saved(tmp_path / "w.pth", strange), metadata=TOLD, photo_check=False)
    assert model.config is not None and (model.config.target.norm, model.config.mask.ratio) == (True, 0.75)


@pytest.mark.parametrize("found", [{"mean": (0.5,) * 3}, {"std": (0.5,) * 3}], ids=["mean", "std"])
def test_half_of_the_statistics_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--mean and --std go together"):
        WeightMetadata(**found)


def test_one_tensor_under_two_names_is_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", tensors | {"module.cls_token": tensors["cls_token"]})
    with pytest.raises(MAEError, match="two tensors for 'cls_token'"):
        load_external(path, metadata=TOLD)


def test_a_refusal_is_short_whatever_the_names(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    kernel, other = tensors["patch_embed.proj.weight"], torch.ones(24)
    for names in ([f"{n}.patch_embed.proj.weight" for n in range(1000)], [f"blocks.{'9' * 4000}.norm1.weight"]):
        extra = {name: kernel.clone() if "embed" in name else other for name in names}
        with pytest.raises(MAEError, match="holds 1001 encoders|not numbered from 0 without") as caught:
            load_external(saved(tmp_path / "w.pth", tensors | extra), metadata=TOLD)
        assert len(str(caught.value)) < 1000


def test_two_models_in_one_file_are_not_chosen_from(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    both = {f"{who}.{name}": tensor for who in ("student", "teacher") for name, tensor in tensors.items()}
    with pytest.raises(UsageError, match="holds 2 encoders"):
        load_external(saved(tmp_path / "w.pth", both), metadata=TOLD)


def folder(tmp_path: Path, tensors: dict[str, Tensor], config: Any) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_attention_heads": "three"}, "num_heads"),
        ('{"a": [' + "[]," * (3 << 20) + "[]]}", "no file of at most 8 MiB"),
        ({"pretrained_cfg": {"mean": [0.5] * 100_000, "std": [0.5] * 100_000}, "architecture": "vit_x"}, "mean"),
        ({"pretrained_cfg": {"license": "x" * 1001}, "architecture": "vit_x"}, "has 1,001 characters"),
        ({"pretrained_cfg": {"mean": [0.5] * 3, "std": [1e-60] * 3}, "architecture": "vit_x"}, "at least 1.2e-38"),
        ({"pretrained_cfg": {"mean": [1e60] * 3, "std": [1] * 3}, "architecture": "vit_x"}, "3 finite numbers"),
        ({"pretrained_cfg": {}, "architecture": "x" * 100_000}, "is timm's"),
        ({"pretrained_cfg": {}, "architecture": "vit_x", "model_args": {"x" * 100_000: 1}}, "is timm's"),
        ({"num_attention_heads": 10**9}, "num_heads is 1000000000"),
        ({"num_attention_heads": -1}, "num_heads is -1"),
        ({"num_attention_heads": 5}, "does not divide"),
        ({"image_size": [16, 16, 16]}, "trained_size"),
        ({"image_size": 0}, "image size 0x0"),
        ({"layer_norm_eps": 1e9}, "norm_eps"),
        ({"layer_norm_eps": float("nan")}, "norm_eps|nan"),
        ({"mask_ratio": {}}, "mask_ratio"),
        ({"architecture": "vit_x", "pretrained_cfg": {"mean": "ImageNet"}}, "mean"),
        ({"architecture": "vit_x", "pretrained_cfg": {"mean": [0.5], "std": [0.5]}}, "mean"),
        ("[1, 2]", "config.json"),
        ("{" * 10000, "config.json"),
        ('{"a": 1', "config.json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_hostile_configuration_is_refused(config: Any, says: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    told = WeightMetadata(decoder_num_heads=2, norm_pix_loss=True, num_heads=None if "num_att" in str(config) else 3)
    with pytest.raises((MAEError, UsageError), match=says) as caught:
        load_external(folder(tmp_path, tensors, config), metadata=told, photo_check=False)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'; expected 'gelu'"),
        ({"model_type": "deit"}, "model_type is 'deit'; expected 'vit_mae' or 'vit'"),
        (
            {"architecture": "resnet50", "pretrained_cfg": {}},
            "is timm's 'resnet50'; expected a plain vision transformer",
        ),
        (
            {"architecture": "vit_x", "pretrained_cfg": {}, "model_args": {"act_layer": "quick_gelu"}},
            "with 'act_layer'",
        ),
        ({"model_type": "vit", "quantization_config": {"bits": 4}}, "is quantised; expected floating-point weights"),
    ],
    ids=["activation", "kind", "architecture", "argument", "quantised"],
)
def test_mathematics_that_names_do_not_show_are_refused(
    config: dict[str, Any], says: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        load_external(folder(tmp_path, tensors, config), metadata=TOLD, photo_check=False)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, "files outside its folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "files outside its folder"),
        ({"weight_map": {"a": "x" * 5000}}, "files outside its folder"),
        ({"weight_map": {"a": ".."}}, "names '..', which is not a file beside it"),
        ({"weight_map": {"a": ""}}, "names '', which is not a file beside it"),
        ({"weight_map": {"a": "\ud800"}}, "which is not a file beside it"),
        ({"weight_map": {f"{number}": f"{number}" for number in range(2000)}}, "too many of them"),
        ({"weight_map": [1]}, "names no files"),
        ({}, "names no files"),
    ],
    ids=["up", "absolute", "long", "the folder above", "itself", "half a letter", "many", "a list", "nothing"],
)
def test_a_hostile_index_is_refused(index: Any, says: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MAEError, match=says):
        read_external(tmp_path / "m")


def test_a_divided_model_is_read_as_one(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    names = sorted(tensors)
    half = len(names) // 2
    weight_map = {}
    for file, part in (("a.safetensors", names[:half]), ("b.safetensors", names[half:])):
        save_file({name: tensors[name].contiguous() for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_external(tmp_path).tensors.keys() == tensors.keys()
    save_file({names[0]: torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(MAEError, match="is in two of its files"):
        read_external(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes by name")
def test_a_part_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")  # to open it would wait for ever
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(MAEError, match=rf"names '{name}', which is not a file beside it"):
            read_external(tmp_path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; expected a weights file"):
        read_external(tmp_path / "nothing")
    with pytest.raises(
        UsageError, match="/dev/null is not a file or folder"
    ):  # as of a pipe, which would be waited for
        read_external(Path("/dev/null"))
    with pytest.raises(
        UsageError, match="holds no weights; expected model.safetensors or pytorch_model.bin or model.pth"
    ):
        read_external(tmp_path)


def test_a_processor_that_does_not_normalise_leaves_values_as_they_are():
    told = {"do_normalize": False, "image_mean": [0.5] * 4, "image_std": [0.2] * 4, "rescale_factor": 1 / 65535}
    assert sidecar._from_preprocessing(told) == {"mean": [0.0] * 4, "std": [1.0] * 4, "pixel_dtype": "uint16"}
    assert sidecar._from_preprocessing({**told, "do_normalize": True})["mean"] == [0.5] * 4


@pytest.mark.parametrize("factor", [1.0, 1 / 127.5, "a"])
def test_a_processor_that_scales_to_another_range_is_refused(factor: object):
    with pytest.raises(UsageError, match="rescale_factor in preprocessor_config.json is .*; expected 1/255 or 1/65535"):
        sidecar._from_preprocessing({"rescale_factor": factor})
    assert sidecar._from_preprocessing({"rescale_factor": factor, "do_rescale": False})["pixel_dtype"] == "float32"
