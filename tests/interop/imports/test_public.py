"""Public weights: the catalogue says what can be, and a name brings in what the file and its words would."""

import errno
import hashlib
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data.flaky import Fault, Flaky, always, serving
from foreign import mmpretrain, official
from safetensors.torch import save_file
from torch import Tensor

import mae
from mae.cli import main
from mae.data.remote import download as downloads
from mae.data.remote import fetch as remote
from mae.data.remote.cache import FOLDER, Draft
from mae.interop.exports.naming import hf_tensors
from mae.interop.imports import catalogue
from mae.interop.imports.catalogue import MODELS, PublicWeights, public_weights
from mae.interop.imports.public import published_metadata
from mae.models.classifier import ImageClassifier
from mae.models.file import load_with_report
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model
from mae.models.pretrained import PretrainedEncoder

LICENCES = {"Apache-2.0", "CC-BY-NC-4.0", "MIT"}
HOSTS = {
    "official": "dl.fbaipublicfiles.com",
    "timm": "huggingface.co",
    "hf": "huggingface.co",
    "mmpretrain": "download.openmmlab.com",
    "lightly": "lightly-ssl-checkpoints.s3.amazonaws.com",
}
TINY = "mae_vit_lesson_patch4"


@pytest.mark.parametrize("name", public_weights())
def test_an_entry_is_well_formed(name: str):
    weights = public_weights()[name]
    publisher, _, rest = name.partition("/")
    assert weights.name == name and re.fullmatch(r"(base|large|huge)(-[a-z0-9]+)?", rest)
    assert weights.url.startswith(f"https://{HOSTS[publisher]}/") and weights.url.isascii() and " " not in weights.url
    assert weights.licence in LICENCES and weights.licence_source
    assert re.fullmatch("[0-9a-f]{8}|[0-9a-f]{64}|", weights.sha256) and re.fullmatch("[0-9a-f]{6}|", weights.md5)
    assert bool(weights.checksum_source) == bool(weights.sha256 or weights.md5)
    least = 4 * weights.parameters  # all are of float32, with positions and little else
    assert weights.num_bytes is None or least < weights.num_bytes < least + 3_000_000
    is_whole = weights.contents == "encoder and decoder"
    assert (weights.norm_pix_loss is not None) == is_whole or name == "lightly/base-100e"
    if publisher == "mmpretrain":
        assert weights.url.endswith(f"-{weights.sha256}.pth")
    if publisher in ("timm", "hf") and weights.sha256:
        assert re.search(r"/resolve/[0-9a-f]{40}/", weights.url), "a checksum is of one revision"


def test_no_file_is_there_twice():
    addresses = [weights.url for weights in public_weights().values()]
    assert len(set(addresses)) == len(addresses) == 28
    checksums = [weights.sha256 or weights.md5 for weights in public_weights().values() if weights.checksum_source]
    assert len(set(checksums)) == len(checksums)


def is_head(weights: PublicWeights, size: str) -> bool:
    return (weights.size, weights.contents) == (size, "classifier")


@pytest.mark.parametrize("size", MODELS)
def test_sizes_are_those_of_the_named_models(size: str):
    with torch.device("meta"):
        model = create_model(MODELS[size])
    config = model.config
    assert config is not None
    counted = tuple(
        sum(weight.numel() for weight in part.parameters() if weight.requires_grad)
        for part in (model.encoder, model.decoder)
    )
    assert counted == catalogue.PARAMETERS[size]
    told = published_metadata(next(weights for weights in public_weights().values() if weights.size == size))
    assert (told.num_heads, told.decoder_num_heads) == (config.encoder.num_heads, config.decoder.num_heads)
    assert told.trained_size == config.layout.size == (224, 224)
    heads = {weights.parameters - counted[0] for weights in public_weights().values() if is_head(weights, size)}
    assert heads == {1000 * (config.encoder.embed_dim + 1)}


def test_terms_are_told_by_name():
    assert catalogue.terms("CC-BY-NC-4.0") == "CC-BY-NC-4.0: not for commercial use"
    assert catalogue.terms("FAIR Noncommercial Research") == "FAIR Noncommercial Research: not for commercial use"
    assert [catalogue.terms(free) for free in ("Apache-2.0", "MIT", "Encore-1")] == ["Apache-2.0", "MIT", "Encore-1"]


def test_the_list_and_what_is_known_of_one(capsys: pytest.CaptureFixture[str]):
    assert main(["list", "weights"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 28
    assert lines[0].split() == ("official/base encoder 86 M parameters CC-BY-NC-4.0: not for commercial use".split())
    assert main(["list", "weights", "mmpretrain/base-1600e"]) == 0
    shown = capsys.readouterr().out
    assert "https://download.openmmlab.com/mmselfsup" in shown and "f7569ca2… (only 8 digits are published)" in shown
    assert main(["list", "weights", "official/large-full"]) == 0
    assert "none published" in capsys.readouterr().out
    assert main(["list", "weights", "official/bse"]) == 2
    assert "did you mean official/base" in capsys.readouterr().err
    assert main(["list", "weights", "nothing"]) == 2
    assert "no public weights are called nothing" in capsys.readouterr().err
    assert main(["list", "models", "official/base"]) == 2


def tiny() -> MaskedAutoencoder:
    torch.manual_seed(0)
    return create_model(TINY)


def alone(model: MaskedAutoencoder) -> dict[str, Tensor]:
    return official(PretrainedEncoder(encoder=model.encoder, config=model.config))


def classifier(model: MaskedAutoencoder) -> dict[str, Tensor]:
    tensors = {name: tensor for name, tensor in alone(model).items() if not name.startswith("norm.")}
    norm, head = torch.nn.LayerNorm(256), torch.nn.Linear(256, 10)
    parts = {"fc_norm": norm, "head": head}
    return tensors | {
        f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()
    }


WRITTEN: dict[str, Callable[[MaskedAutoencoder], Any]] = {
    "official/base": lambda model: {"model": alone(model)},
    "official/base-full": lambda model: {"model": official(model)},
    "official/base-visualize": lambda model: {"model": official(model)},
    "official/base-finetuned": lambda model: {"model": classifier(model)},
    "timm/base": alone,
    "hf/base": lambda model: hf_tensors(official(model), prefix="vit."),
    "mmpretrain/base-300e": lambda model: {"state_dict": mmpretrain(model)},
}
"""Stand-ins for what the publishers have, of a tiny model."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for name, make in WRITTEN.items():
        content, file = make(tiny()), folder / name.replace("/", "-")
        save_file(content, file) if name == "timm/base" else torch.save(content, file)
    return folder


@pytest.fixture
def site(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Flaky, dict[str, PublicWeights]]]:
    """A server of stand-ins, and a catalogue that names them and is otherwise as it is; one types in a new folder."""
    (tmp_path / "typed").mkdir()
    monkeypatch.chdir(tmp_path / "typed")
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(downloads, "PROTOCOL", "http://127.0.0.1")
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    monkeypatch.setitem(MODELS, "base", TINY)
    with serving(written) as flaky:
        known = {}
        for name in WRITTEN:
            content = (written / name.replace("/", "-")).read_bytes()
            plain = public_weights()[name]
            known[name] = replace(
                plain,
                url=f"{flaky.url}/{name.replace('/', '-')}",
                num_bytes=plain.num_bytes and len(content),
                sha256=hashlib.sha256(content).hexdigest()[: len(plain.sha256)],
                md5=hashlib.md5(content).hexdigest()[: len(plain.md5)],
            )
        monkeypatch.setattr(catalogue, "public_weights", lambda: known)
        yield flaky, known


@pytest.mark.parametrize("name", WRITTEN)
def test_a_name_brings_in_what_the_file_and_its_words_would(name, site, capsys):
    flaky, known = site
    assert main(["import", name, "--out", "by-name"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("Licence ") == 1 and captured.err.count("fetching http") == 0
    assert f"Licence {catalogue.terms(known[name].licence)}\n" in captured.out
    model, report = load_with_report(Path("by-name/model.safetensors"))
    assert report.origin["licence"] == known[name].licence
    (digest,) = re.findall(r"SHA-256 ([0-9a-f]{64})", report.origin["imported_from"])
    assert report.origin["imported_from"].startswith(f"{name}, {known[name].url}, SHA-256 {digest} (")
    assert digest == hashlib.sha256((flaky.root / name.replace("/", "-")).read_bytes()).hexdigest()
    expected = tiny()
    if known[name].contents == "encoder and decoder":
        assert isinstance(model, MaskedAutoencoder) and model.config.target.norm == known[name].norm_pix_loss
    assert isinstance(model, ImageClassifier) == (known[name].contents == "classifier")
    assert (
        model.config.tokenizer.mean == (0.485, 0.456, 0.406) and model.config.encoder.norm_eps == known[name].norm_eps
    )
    assert (model.config.encoder.num_heads, model.config.layout.size) == (4, (32, 32))
    kernel = "encoder.blocks.1.attn.qkv.weight"
    assert torch.equal(model.state_dict()[kernel], expected.state_dict()[kernel])
    (command,) = [line for line in told(name, capsys) if line.startswith("as a file")]
    words = shlex.split(command.removeprefix("as a file"))[1:]
    words = [
        {"FILE": str(flaky.root / name.replace("/", "-")), "vit-base": "by-file"}.get(word, word) for word in words
    ]
    assert main(words) == 0
    assert f"Licence {catalogue.terms(known[name].licence)}\n" in capsys.readouterr().out
    same, other = load_with_report(Path("by-file/model.safetensors"))
    assert same.config == model.config and other.origin["licence"] == report.origin["licence"]
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[key])


def told(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["list", "weights", name]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_is_fetched_once_needs_no_network_and_says_so_everywhere(site, capsys, caplog):
    flaky, _ = site
    with caplog.at_level(logging.WARNING):
        model = mae.load("official/base")
    lines = [record.getMessage() for record in caplog.records]
    assert sum("not for commercial use" in line for line in lines) == 1
    assert any(line.startswith(f"fetching {flaky.url}/official-base (") for line in lines)
    flaky.spoil = always(Fault(status=503))
    images = torch.zeros(1, 3, 32, 32)
    assert torch.equal(mae.load("official/base").encode(images).mean, model.encode(images).mean)
    assert main(["import", "official/base", "--out", "m.safetensors", "--licence", "mine"]) == 0
    assert "Licence mine\n" in capsys.readouterr().out
    assert main(["import", "official/base", "--out", "n.safetensors", "--norm-eps", "1e-5"]) == 1  # timm knows better
    assert "norms' epsilon differ" in capsys.readouterr().err
    assert main(["import", "official/base", "--out", "n.safetensors"]) == 0
    assert main(["show", "n.safetensors"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "licence CC-BY-NC-4.0: not for commercial use" in shown and "imported from official/base, http" in shown


def test_what_lies_there_counts_before_the_catalogue(site, capsys):
    flaky, _ = site
    Path("official").mkdir()
    torch.save(alone(tiny()), "official/base")
    assert main(["import", "official/base", "--out", "mine"]) == 0
    assert "Licence" not in capsys.readouterr().out and flaky.asked == []


def test_a_name_that_is_none_is_told_the_nearest(site, capsys):
    assert main(["import", "official/base-ful", "--out", "m"]) == 2
    told = capsys.readouterr().err
    assert "official/base-ful is neither a file nor the name of public weights; did you mean official/base-full" in told
    assert main(["import", "elsewhere/base", "--out", "m"]) == 2
    assert "elsewhere/base is not there; expected a run folder" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def full(draft: Draft, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("accident", ["no network", "another file", "full disk", "no weights"])
def test_what_fails_is_one_line_and_leaves_nothing(accident, site, capsys, monkeypatch, tmp_path):
    flaky, known = site
    if accident == "no network":
        with serving(tmp_path) as gone:
            known["official/base"] = replace(known["official/base"], url=f"{gone.url}/w.pth")
        expected = f"{gone.url}/w.pth cannot be fetched: .*; download it by other means and import the file as"
    elif accident == "another file":
        flaky.spoil = always(Fault(flip=9000))
        expected = "official-base is not the published file: its checksum is"
    elif accident == "full disk":
        monkeypatch.setattr(Draft, "write", full)
        expected = "official/base cannot be stored in .*No space left on device; free some space"
    else:
        (flaky.root / "page").write_bytes(b"<html>")
        page = replace(known["official/base"], url=f"{flaky.url}/page", num_bytes=None, sha256="", md5="")
        known["official/base"] = page
        expected = "begins with b'<htm' and is not a weights file"
    assert main(["import", "official/base", "--out", "m"]) == (2 if accident == "no weights" else 1)
    told = capsys.readouterr().err
    assert re.search(expected, told) and told.count("mae: error: ") == told.count("\n") == 1
    assert list(Path().iterdir()) == []
