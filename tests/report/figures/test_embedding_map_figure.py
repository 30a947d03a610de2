"""The map as a picture."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mae.report.figures.map import _apart, draw_map


def test_pictures_in_colours_of_their_classes_stand_at_their_places(tmp_path: Path):
    pictures = torch.zeros(3, 16, 16, 3, dtype=torch.uint8)
    draw_map(
        torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]]),
        pictures,
        labels=torch.tensor([0, 1, -1]),
        class_names=("red ones", "blue ones"),
        colours={0: torch.tensor([1.0, 0, 0]), 1: torch.tensor([0, 0, 1.0])},
        title="Map",
        caption="how to read it",
        path=tmp_path / "map.png",
    )
    shown = np.asarray(Image.open(tmp_path / "map.png").convert("RGB"))
    black = (shown == 0).all(axis=2)
    red, blue = ((shown == colour).all(axis=2) for colour in ((255, 0, 0), (0, 0, 255)))
    grey = (abs(shown - np.array([140, 148, 161])) < 2).all(axis=2)
    assert grey[-len(grey) // 4 :].any()  # in the legend: one of the pictures has no class
    assert red.sum() > 2 * 2 * 20 and blue.sum() > 2 * 2 * 20
    rows, columns = np.nonzero(red[: red.shape[0] // 2])
    assert columns.max() < 100  # at the upper left, with its picture inside
    assert black[rows.min() : rows.max(), columns.min() : columns.max()].sum() == 16 * 16


def test_none_of_those_shown_covers_another_and_none_could_be_added():
    at = torch.randint(0, 300, (400, 2), generator=torch.Generator().manual_seed(0))
    taken = _apart(at, 30)
    apart = (at[taken].unsqueeze(1) - at[taken]).abs().amax(dim=2)
    assert int((apart + 1000 * torch.eye(len(taken), dtype=torch.long)).min()) >= 30
    assert int((at.unsqueeze(1) - at[taken]).abs().amax(dim=2).amin(dim=1).max()) < 30
