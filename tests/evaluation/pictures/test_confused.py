"""Examples of the commonest confusions: which pairs, and which images."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from data.pictures import png
from tiny_task import make_task, small_model, striped

from mae.data.dataset.images import load_images
from mae.data.sources.open import open_source
from mae.evaluation.pictures import confused
from mae.evaluation.pictures.confused import draw_confused, most_confused


def test_confusions_are_those_of_a_plain_count():
    generator = torch.Generator().manual_seed(0)
    labels, predicted = (torch.randint(0, 6, (200,), generator=generator) for _ in range(2))
    pairs = list(zip(labels.tolist(), predicted.tolist(), strict=True))
    counted = Counter(pair for pair in pairs if pair[0] != pair[1])
    expected = sorted(counted.items(), key=lambda item: (-item[1], item[0]))[:4]
    assert most_confused(labels, predicted, num_classes=6) == [(*pair, count) for pair, count in expected]
    assert most_confused(labels, labels, num_classes=6) == []
    # Of so many classes a whole matrix would have 8 TB.
    assert most_confused(labels, predicted, num_classes=1_000_000) == [(*pair, count) for pair, count in expected]


def test_images_of_a_pair_are_of_that_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = make_task(tmp_path, small_model(), train=striped(30, seed=0), test=striped(40, seed=1))
    labels = task.labels("test")
    predicted = labels.clone()
    wrong = (labels == 0).nonzero()[:7, 0]
    predicted[wrong] = 1
    seen = {}
    drawn = confused.write_examples
    monkeypatch.setattr(
        confused, "write_examples", lambda *args, **named: (seen.update(rows=args[1], **named), drawn(*args, **named))
    )
    images, labels = task.images("test"), task.labels("test")
    draw_confused(images, labels, predicted, names=task.class_names, title="t", path=tmp_path / "c.png")
    assert seen["rows"] == [task.images("test").readable[wrong[:5]].tolist()]
    assert seen["notes"][0][0][2] == f"7 of {int((labels == 0).sum())}"
    assert (tmp_path / "c.png").stat().st_size > 1000


def test_images_of_different_rows_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each row is of one class, which may have a folder: it is left out of names only where all rows are in it."""
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        (tmp_path / "photos" / label / "1.png").write_bytes(png(8, 8))
    seen: list[list[list[list[str]]]] = []
    monkeypatch.setattr(confused, "write_examples", lambda *args, notes, **named: seen.append(notes))
    images = load_images(open_source(str(tmp_path / "photos"), data_root=tmp_path), in_chans=None)
    draw_confused(
        images, torch.tensor([0, 1]), torch.tensor([1, 0]), names=("cat", "dog"), title="t", path=tmp_path / "c.png"
    )
    assert [row[0][3] for row in seen[0]] == ["cat/1.png", "dog/1.png"]
