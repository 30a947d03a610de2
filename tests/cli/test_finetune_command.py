"""`mae finetune` as it is typed."""

from pathlib import Path
from typing import Any

import pytest
from drawn_masks import drawn_masks
from drawn_objects import drawn_objects
from tiny_task import small_model

import mae
from mae.cli import finetune, main
from mae.cli.evaluate import Request
from mae.evaluation.protocols import PROTOCOLS
from mae.evaluation.protocols.finetune_segmentation import FinetuneSegmentation


def code_of(*words: str) -> int:
    """Exit code, also where the parser stops the program itself."""
    try:
        return main(list(words))
    except SystemExit as stopped:
        return int(stopped.code or 0)


def test_kinds_are_the_protocols_that_fine_tune(capsys: pytest.CaptureFixture[str]):
    known = finetune.kinds()
    assert known["classes"].name == "finetune" and known["segmentation"] is FinetuneSegmentation
    assert len(known) == sum(protocol.name.startswith("finetune") for protocol in PROTOCOLS)
    assert code_of("finetune", "--help") == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in known) and "mae finetune KIND" in shown


@pytest.mark.parametrize("kind", list(finetune.kinds()))
def test_each_kind_tells_its_options(kind: str, capsys: pytest.CaptureFixture[str]):
    assert code_of("finetune", kind, "--help") == 0
    shown = capsys.readouterr().out
    assert f"mae finetune {kind}" in shown and "--data" in shown


def test_another_kind_is_refused(capsys: pytest.CaptureFixture[str]):
    assert code_of("finetune", "segmentatoin", "model.safetensors", "--data", "x") == 2
    assert "segmentation" in capsys.readouterr().err


def test_models_of_other_libraries_are_brought_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def write(path: Path, out: Path, **_: Any) -> None:
        asked.append(str(path))
        out.write_text("a model")

    monkeypatch.setattr("mae.interop.imports.open.import_model", write)
    request = Request(model="hf:a/vit", data="hf:a/set")
    protocol = FinetuneSegmentation(beside=("scratch", "timm:vit", "hf:a/vit", "runs/x"))
    for _ in range(2):
        found, other = finetune.brought_in(request, protocol)
    assert sorted(asked) == ["hf:a/vit", "timm:vit"]
    assert found.data == "hf:a/set" and Path(found.model).is_file()
    assert isinstance(other, FinetuneSegmentation)
    assert other.beside[0] == "scratch" and other.beside[2] == found.model and other.beside[3] == "runs/x"


@pytest.mark.parametrize(("drawn", "kind"), [(drawn_masks, "segmentation"), (drawn_objects, "detection")])
def test_folders_of_other_labels_are_no_classes(
    drawn: Any, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    drawn(tmp_path / "data")
    mae.save(small_model(in_chans=3, mean=(0.3,) * 3, std=(0.2,) * 3), tmp_path / "m.safetensors")
    words = ["classes", str(tmp_path / "m.safetensors"), "--data", str(tmp_path / "data"), "--device", "cpu"]
    assert code_of("finetune", *words, "--epochs", "1") == 2
    told = capsys.readouterr().err
    assert "no classes but labels of another kind" in told and f"mae finetune {kind}" in told
