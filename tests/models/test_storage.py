"""Models' files: what they say, what is loaded of them, and what is refused before or after it."""

import json
import platform
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import images_for, tiny_config, tiny_model
from torch import Tensor, nn
from torch.nn.functional import layer_norm

import mae
from mae.core.method import MethodConfig
from mae.errors import MAEError, UsageError
from mae.layers.lora import add_lora
from mae.models import file as storage
from mae.models.build import build_model
from mae.models.file import load_model, load_with_report, model_metadata, save_model
from mae.models.fingerprint import TOLERANCE, output_fingerprint
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.version import __version__

ORIGIN = {"recipe": "cifar10", "data_source": "builtin:digits", "data_fingerprint": "0a1b"}


def write(path: Path, model: MaskedAutoencoder, **said: Any) -> Path:
    save_file(model.state_dict(), path, model_metadata(model, probe=output_fingerprint(model), **said))
    return path


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Change a file's tensors and its record."""
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["mae"])
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors, record)
    save_file(tensors, path, {"mae": json.dumps(record)})


@pytest.mark.parametrize("alone", [False, True], ids=["whole", "encoder alone"])
def test_a_model_of_any_loop_is_saved_with_all_it_needs(alone: bool, tmp_path: Path) -> None:
    whole = tiny_model(mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1)).train()
    model = PretrainedEncoder(encoder=whole.encoder, config=whole.config) if alone else whole
    mae.save(model, tmp_path / "mine.safetensors", licence="MIT")
    assert model.training
    loaded, report = load_with_report(tmp_path / "mine.safetensors")
    assert type(loaded) is type(model) and loaded.config == model.config and report.origin["licence"] == "MIT"
    assert report.probe is not None and report.probe < 1e-12
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    by_hand = PretrainedEncoder(encoder=whole.encoder)
    with pytest.raises(ValueError, match="put together by hand"):
        mae.save(by_hand, tmp_path / "other.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    model = tiny_model(
        mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1), target="low_pass", target_cutoff=0.5, channels=("R", "G", "N")
    )
    return write(tmp_path / "m.safetensors", model, licence="CC-BY-4.0", origin=ORIGIN)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_type_are_saved_as_float32(kind: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model().to(kind)
    mae.save(model, path := tmp_path / "m.safetensors")
    assert {tensor.dtype for tensor in model.state_dict().values()} == {kind}
    for name, tensor in mae.load(path).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].float())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_model_that_was_of_half_precision_for_a_while_is_saved_and_loaded(kind: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model().to(kind).float()
    mae.save(model, path := tmp_path / "m.safetensors")
    images = images_for(model)
    assert torch.equal(mae.load(path).encode(images).mean, model.eval().encode(images).mean)


def _compiled(model: MaskedAutoencoder) -> PretrainedEncoder:
    model.encoder = torch.compile(model.encoder, backend="eager")
    return model


def _adapted(model: MaskedAutoencoder) -> PretrainedEncoder:
    add_lora(model.encoder, rank=2)
    return model


@pytest.mark.parametrize("change", [_compiled, _adapted])
def test_a_model_changed_behind_its_configuration_is_not_saved(
    change: Callable[[MaskedAutoencoder], PretrainedEncoder], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"not those that its configuration describes \(encoder\."):
        mae.save(change(tiny_model()), tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_would_not_load_is_not_saved(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(UsageError, match="is a folder; expected a file"):
        mae.save(model, tmp_path)
    model.decoder.pred.bias.data[0] = torch.nan
    with pytest.raises(UsageError, match=r"the weights decoder\.pred\.bias are not all finite"):
        mae.save(model, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_model_comes_back_with_all_that_was_said_of_it(whole: Path) -> None:
    model = tiny_model(
        mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1), target="low_pass", target_cutoff=0.5, channels=("R", "G", "N")
    )
    loaded, report = load_with_report(whole)
    assert loaded.config == model.config and not loaded.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    images = images_for(model)
    assert torch.equal(load_model(whole).encode(images).mean, model.encode(images).mean)
    versions = {"mae": __version__, "torch": torch.__version__, "python": platform.python_version()}
    assert report.channels == ("R", "G", "N")
    assert report.origin == {
        **ORIGIN,
        "init_from": None,
        "imported_from": None,
        "versions": versions,
        "licence": "CC-BY-4.0",
    }
    assert report.probe is not None and report.probe < 1e-12
    with safe_open(whole, framework="pt") as file:
        record = json.loads(file.metadata()["mae"])
    assert (
        record["format"] == storage.FORMAT
        and record["kind"] == "masked_autoencoder"
        and record["grid"] == [4, 6]
        and record["target"] == "low_pass"
    )
    assert record["config"]["mask"]["ratio"] == 0.75 and len(record["probe"]["features"]) == 16


@pytest.mark.parametrize(
    ("changes", "kind"), [({}, "pixels"), ({"target": "low_pass"}, "low_pass")], ids=lambda value: str(value)
)
def test_the_kind_of_target_is_named_and_what_is_not_known_is_null(changes: dict[str, Any], kind: str) -> None:
    record = json.loads(model_metadata(tiny_model(**changes))["mae"])
    assert record["target"] == kind
    assert record["channels"] is record["probe"] is record["origin"]["licence"] is record["origin"]["recipe"] is None


def test_loading_leaves_the_callers_random_numbers_alone(whole: Path) -> None:
    before = torch.random.get_rng_state()
    load_model(whole)
    assert torch.equal(torch.random.get_rng_state(), before)


def swap_queries_and_keys(tensors: dict[str, Tensor]) -> None:
    name = "encoder.blocks.1.attn.qkv.weight"
    query, key, value = tensors[name].chunk(3)
    tensors[name] = torch.cat([key, query, value])


def nudge(tensors: dict[str, Tensor]) -> None:
    tensors["decoder.blocks.0.mlp.fc1.weight"][3, 5] += 1e-2


@pytest.mark.parametrize(
    "tamper",
    [
        lambda tensors: tensors["encoder.blocks.0.attn.qkv.bias"].zero_(),
        lambda tensors: tensors["decoder.blocks.1.mlp.fc2.bias"].zero_(),
        swap_queries_and_keys,
        nudge,
    ],
)
def test_changed_weights_do_not_reproduce_the_probe(tamper: Callable[..., object], whole: Path) -> None:
    rewrite(whole, lambda tensors, record: tamper(tensors))
    with pytest.raises(MAEError, match=r"does not reproduce the probe in its file \(largest difference \d") as refused:
        load_model(whole)
    versions = f"mae {__version__}, torch {torch.__version__}, python {platform.python_version()}"
    assert str(refused.value).endswith(f"the versions that wrote it: {versions}")


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        (None, "wrote it: not known"),
        ("x" * 1000, f"wrote it: '{'x' * 199}…"),
        ({"mae": "x" * 1000}, f"wrote it: mae {'x' * 196}"),
        ({"mae": "\x1b[2J"}, r"wrote it: 'mae \x1b[2J'"),
        ({"mae": {"a": [1]}}, "wrote it: mae {'a': [1]}"),
    ],
)
def test_foreign_versions_are_shown_within_bounds(versions: object, says: str, whole: Path) -> None:
    def change(tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        nudge(tensors)
        record["origin"]["versions"] = versions

    rewrite(whole, change)
    with pytest.raises(MAEError) as refused:
        load_model(whole)
    assert str(refused.value).endswith(says)


@pytest.mark.parametrize("field", ["format", "grid", "channels"])
def test_a_foreign_value_is_shown_within_bounds(field: str, whole: Path) -> None:
    rewrite(whole, lambda tensors, record: record.update({field: ["x" * 1000] * 100}))
    with pytest.raises(MAEError, match="xxx…") as refused:
        load_model(whole)
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("slot", "option", "value"),
    [
        ("encoder", "num_heads", 2),
        ("decoder", "num_heads", 4),
        ("mask", "ratio", 0.5),
        ("tokenizer", "mean", [0.5, 0.4, 0.2]),
        ("tokenizer", "img_size", [24, 16]),
    ],
)
def test_a_changed_configuration_does_not_reproduce_the_probe(
    slot: str, option: str, value: object, whole: Path
) -> None:
    def change(tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        record["config"][slot][option] = value
        record["grid"] = [6, 4] if option == "img_size" else record["grid"]

    rewrite(whole, change)
    with pytest.raises(MAEError, match="probe in its header is of another configuration"):
        load_model(whole)


def test_a_file_that_is_older_than_an_option_reproduces_its_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now = tiny_model(), MethodConfig.to_json

    def before(config: MethodConfig) -> dict[str, Any]:
        values = now(config)
        del values["adapter"], values["encoder"]["mask_tokens"]
        return values

    with monkeypatch.context() as patched:
        patched.setattr(MethodConfig, "to_json", before)
        path = write(tmp_path / "m.safetensors", model)
    loaded, report = load_with_report(path)
    assert loaded.config == model.config and report.probe is not None and report.probe < 1e-12
    rewrite(path, lambda tensors, record: record["config"]["encoder"].update(mask_tokens=False))
    with pytest.raises(MAEError, match="probe in its header is of another configuration"):
        load_model(path)


def test_other_code_does_not_reproduce_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    path = write(tmp_path / "m.safetensors", build_model(tiny_config()))
    load_model(path)
    with monkeypatch.context() as patched:
        patched.setattr(nn.LayerNorm, "forward", lambda self, x: layer_norm(x, (x.shape[-1],), self.weight, self.bias))
        with pytest.raises(MAEError, match="the norms' eps"):
            load_model(path)
    monkeypatch.setattr(
        "mae.layers.attention.scaled_dot_product_attention", lambda q, k, v, **_: v[:, :, : q.shape[2]] + 0 * q
    )
    with pytest.raises(MAEError, match="does not reproduce"):
        load_model(path)


def test_rounding_reproduces_the_probe(whole: Path) -> None:
    def change(tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        record["probe"]["features"] = [value * (1 + 0.2 * TOLERANCE) for value in record["probe"]["features"]]

    rewrite(whole, change)
    report = load_with_report(whole)[1]
    assert report.probe == pytest.approx(0.2 * TOLERANCE, rel=1e-3)
    assert report.line().endswith("probe reproduced (largest difference 6e-09)")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        load_model(whole)
    finally:
        torch.set_num_threads(threads)


def test_the_line_tells_tensors_and_parameters_by_part(whole: Path, tmp_path: Path) -> None:
    report = load_with_report(whole)[1]
    numbers: dict[str, list[int]] = {"encoder": [], "decoder": []}
    for name, tensor in load_file(whole).items():
        numbers[name.split(".")[0]].append(len(tensor.reshape(-1).tolist()))
    for part, found in ((report.encoder, numbers["encoder"]), (report.decoder, numbers["decoder"])):
        assert part.tensors == part.tensors_expected == len(found)
        assert part.parameters == part.parameters_expected == sum(found)
    encoder, decoder = (f"{len(sizes)}/{len(sizes)}" for sizes in numbers.values())
    assert report.line().startswith(
        f"loaded encoder {encoder} tensors ({sum(numbers['encoder']):,} parameters), "
        f"decoder {decoder} ({sum(numbers['decoder']):,}), probe reproduced (largest difference "
    )
    large = tiny_model(embed_dim=96, num_heads=4)
    line = load_with_report(write(tmp_path / "l.safetensors", large))[1].line()
    assert f"({sum(p.numel() for p in large.encoder.parameters()) / 1e6:.1f}M parameters)" in line


def test_a_part_of_the_encoder_is_loaded_only_where_that_is_allowed(whole: Path) -> None:
    gone = ["encoder.blocks.0.attn.qkv.bias", "encoder.norm.weight"]
    before = load_file(whole)
    size = {name: tensor.numel() for name, tensor in before.items() if name.startswith("encoder.")}
    share = 1 - sum(size[name] for name in gone) / sum(size.values())
    rewrite(whole, lambda tensors, record: ([tensors.pop(name) for name in gone], tensors.update(head=torch.ones(1))))
    for load in (load_model, load_with_report):
        with pytest.raises(
            MAEError, match=r"2 missing \(encoder.blocks.0.*norm.weight\), 1 extra \(head\).*allow_part"
        ):
            load(whole)
    with pytest.raises(MAEError, match=rf"{len(size) - 2}/{len(size)} encoder tensors, {share:.1%} of.*encoder.norm.w"):
        load_with_report(whole, allow_partial=share + 1e-3)
    model, report = load_with_report(whole, allow_partial=share - 1e-3)
    assert report.missing == tuple(name for name in model.state_dict() if name in gone) and report.ignored == ("head",)
    assert report.encoder.parameters == round(share * sum(size.values()))
    assert report.encoder.tensors == len(size) - 2 and report.probe is None
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before if name not in gone)
    assert torch.equal(model.encoder.norm.weight, torch.ones(24)) and not model.training  # fresh
    assert f"encoder {len(size) - 2}/{len(size)} tensors ({report.encoder.parameters:,} of " in report.line()
    assert "not in the file and fresh: encoder.blocks.0.attn.qkv.bias, encoder.norm.weight" in report.line()
    assert report.line().endswith("ignored: head, probe not compared: tensors are missing")
    with pytest.raises(MAEError, match=r"encoder.norm.bias is .*expected"):
        rewrite(whole, lambda tensors, record: tensors.update({"encoder.norm.bias": torch.zeros(3)}))
        load_with_report(whole, allow_partial=0.1)


def test_an_encoder_alone_needs_to_be_allowed_and_its_decoder_is_fresh_alike_each_time(whole: Path) -> None:
    def keep_encoder(tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("decoder.")]:
            del tensors[name]

    rewrite(whole, keep_encoder)
    for load in (load_model, load_with_report):
        with pytest.raises(UsageError, match="holds an encoder only"):
            load(whole)
    torch.manual_seed(1)
    first, report = load_with_report(whole, allow_partial=1.0)
    torch.manual_seed(2)
    second = load_with_report(whole, allow_partial=1.0)[0]
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())
    decoder = len(first.decoder.state_dict())
    assert report.decoder.tensors == report.decoder.parameters == 0 and len(report.missing) == decoder
    assert f"decoder 0/{decoder} (0 of " in report.line() and f" and {decoder - 3} more, probe not" in report.line()


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share: float, whole: Path) -> None:
    with pytest.raises(UsageError, match="allow_partial is"):
        load_with_report(whole, allow_partial=share)


def test_extra_tensors_alone_are_ignored_where_that_is_allowed_and_the_probe_is_compared(whole: Path) -> None:
    rewrite(whole, lambda tensors, record: tensors.update({"head\x1b[31m": torch.ones(1)}))
    _, report = load_with_report(whole, allow_partial=1.0)
    assert report.probe is not None and report.missing == ()
    assert r"ignored: 'head\x1b[31m'" in report.line() and report.line().isprintable()


RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "grid": ({"grid": [2, 12]}, r"grid is \[2, 12\]; its configuration makes \[4, 6\]"),
    "channels": ({"channels": ["R", "N", "G"]}, r"its configuration names \['R', 'G', 'N'\]"),
    "no names": ({"channels": [1, 2, 3]}, "its configuration names"),
    "origin": ({"origin": None}, "says nothing valid"),
    "licence": ({"origin": {"licence": 123}}, "its licence is 123; expected text"),
    "probe": ({"probe": {"image_sha256": "", "features": [1.0] * 16, "prediction": [1.0] * 15}}, "16 finite numbers"),
    "kind of probe": ({"probe": {"image_sha256": 1, "features": [], "prediction": []}}, "valid string"),
    "part of a probe": ({"probe": {"image_sha256": ""}}, "says nothing valid"),
    "format": ({"format": 1}, f"of format 1; this version of mae reads format {storage.FORMAT}"),
    "deep": ({"origin": {"recipe": json.loads("[" * 50 + "]" * 50)}}, "nested more than 8 deep"),
    "long": ({"origin": {"recipe": "x" * (1 << 20)}}, "says nothing valid"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_none_is_refused(name: str, whole: Path) -> None:
    change, says = RECORDS[name]
    rewrite(whole, lambda tensors, record: record.update(change))
    with pytest.raises(MAEError, match=says):
        load_model(whole)


def test_a_record_with_a_field_twice_is_refused(whole: Path) -> None:
    with safe_open(whole, framework="pt") as file:
        text = file.metadata()["mae"].replace('"format": ', '"format": 0, "format": ')
    save_file(load_file(whole), whole, {"mae": text})
    with pytest.raises(MAEError, match="says 'format' twice"):
        load_model(whole)


def test_what_no_reader_would_take_is_not_written() -> None:
    model = tiny_model()
    for origin, says in (
        ({"recipe": "x" * (1 << 20)}, "characters; at most"),
        ({"recipe": json.loads("[" * 20 + "]" * 20)}, "nested more than 8 deep"),
        ({"receipt": "default"}, "unknown origin of a model 'receipt'; did you mean recipe"),
    ):
        with pytest.raises(UsageError, match=says):
            model_metadata(model, origin=origin)
    model.config = None
    with pytest.raises(ValueError, match="build_model"):
        model_metadata(model)


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's header and what follows it."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_together(path: Path, header: str, rest: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + rest)


def test_a_file_put_together_by_hand_loads(whole: Path) -> None:
    header, rest = parts_of(whole)
    put_together(whole, json.dumps(header), rest)
    load_model(whole)


@pytest.mark.parametrize("kind", ["same", "other place", "metadata", "shape"])
def test_a_header_that_says_something_twice_is_refused(kind: str, whole: Path) -> None:
    header, rest = parts_of(whole)
    text = json.dumps(header)
    place = json.dumps(header["decoder.mask_token"])
    other = json.dumps(header["decoder.mask_token"] | {"data_offsets": [0, 64]})
    added = {
        "same": f'"decoder.mask_token": {place}',
        "other place": f'"decoder.mask_token": {other}',
        "metadata": '"__metadata__": {}',
        "shape": '"new": {"dtype": "F32", "shape": [1], "shape": [1], "data_offsets": [0, 4]}',
    }[kind]
    put_together(whole, text[:-1] + f", {added}" + "}", rest)
    with pytest.raises(MAEError, match=r"cannot be read as a safetensors file: its header .* says '\S+' twice"):
        load_model(whole)


@pytest.mark.parametrize("kind", ["longer", "shorter", "overlap", "beyond", "empty", "cut", "deep", "text", "huge"])
def test_a_file_whose_header_does_not_describe_it_is_refused(
    kind: str, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, rest = parts_of(whole)
    name = "decoder.mask_token"
    start, end = header[name]["data_offsets"]
    if kind in ("overlap", "beyond"):
        moved = [start - 4, end - 4] if kind == "overlap" else [len(rest), len(rest) + end - start]
        put_together(whole, json.dumps(header | {name: header[name] | {"data_offsets": moved}}), rest)
    else:
        content = {
            "longer": whole.read_bytes() + b"\0" * 4,
            "shorter": whole.read_bytes()[:-4],
            "empty": b"",
            "cut": whole.read_bytes()[:5],
            "deep": struct.pack("<Q", 1 << 20) + b"[" * (1 << 20),
            "text": b"no tensors here at all",
            "huge": struct.pack("<Q", 50 << 20) + b'{"a": "' + b"x" * (50 << 20) + b'"}',
        }[kind]
        whole.write_bytes(content)
    monkeypatch.setattr(storage, "build", None)  # nothing is built, so nothing is allocated
    with pytest.raises(MAEError, match="cannot be read as a safetensors file: .*header"):
        load_model(whole)


def test_a_file_that_is_not_there_is_an_error_without_traceback(tmp_path: Path) -> None:
    with pytest.raises(MAEError, match="nowhere.safetensors cannot be read"):
        load_model(tmp_path / "nowhere.safetensors")


def test_the_deepest_model_fits_into_the_header_that_is_read() -> None:
    config = tiny_config(depth=256, decoder_depth=256)
    with torch.device("meta"):
        state = build_model(config).state_dict()
    entry = {"dtype": "F32", "shape": [16384, 16384], "data_offsets": [10**12, 10**12]}
    # Each quote of the record, which is text within text, takes two characters.
    assert len(json.dumps(dict.fromkeys(state, entry))) + 2 * storage._MAX_RECORD < storage._MAX_HEADER


def encoder_of(model: MaskedAutoencoder) -> PretrainedEncoder:
    return PretrainedEncoder(encoder=model.encoder, config=model.config).eval()


def test_an_encoder_alone_comes_back_as_one(tmp_path: Path) -> None:
    model = encoder_of(tiny_model())
    path = tmp_path / "encoder.safetensors"
    save_model(model, path, model_metadata(model, probe=output_fingerprint(model)))
    loaded, report = load_with_report(path)
    assert type(loaded) is PretrainedEncoder and not list(tmp_path.glob(".*"))
    images = images_for(tiny_model())
    assert torch.equal(loaded.encode(images).patches, model.encode(images).patches)
    assert (
        report.decoder.tensors_expected == 0 and "no decoder" in report.line() and "probe reproduced" in report.line()
    )
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["mae"])
    assert record["kind"] == "encoder" and record["target"] is None and record["probe"]["prediction"] is None
    with pytest.raises(UsageError, match="holds an encoder only"):
        load_model(path)


def test_a_changed_encoder_alone_does_not_reproduce_its_probe(tmp_path: Path) -> None:
    model = encoder_of(tiny_model())
    path = tmp_path / "encoder.safetensors"
    save_model(model, path, model_metadata(model, probe=output_fingerprint(model)))
    rewrite(path, lambda tensors, record: tensors["encoder.blocks.1.attn.qkv.bias"][:9].zero_())
    with pytest.raises(MAEError, match="does not reproduce"):
        load_with_report(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, record: record.update(kind="encoder"), "extra"),
        (lambda tensors, record: record.update(kind="detective"), "its kind is 'detective'"),
        (lambda tensors, record: record["probe"].update(prediction=None), "does not reproduce"),
    ],
    ids=["called an encoder", "unknown kind", "probe without a prediction"],
)
def test_a_file_that_lies_about_its_kind_is_refused(change: Callable[..., object], says: str, whole: Path) -> None:
    rewrite(whole, change)
    with pytest.raises(MAEError, match=says):
        load_with_report(whole)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = encoder_of(tiny_model())
    with pytest.raises(MAEError, match="cannot be written"):
        save_model(model, tmp_path / "file" / "m.safetensors", model_metadata(model))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
