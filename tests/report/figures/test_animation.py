"""The GIF: every frame in its order, what stands still does not flicker, there whole or not at all."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from mae.errors import MAEError
from mae.models.presets import create_model
from mae.models.reconstruction import reconstruct
from mae.report.figures.animation import write_animation
from mae.report.figures.panels import draw_frame


def page(level: int, size: tuple[int, int] = (60, 40)):
    """Draws a picture: its left half noise that stays the same, its right half one grey."""

    def draw(path: Path) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        pixels[:, size[0] // 2 :] = level
        Image.fromarray(pixels).save(path)

    return draw


def frames(path: Path) -> tuple[list[np.ndarray], list[int], Image.Image]:
    with Image.open(path) as image:
        each = [(np.asarray(frame.convert("RGB")).astype(int), frame.info["duration"]) for frame in iter_of(image)]
        return [pixels for pixels, _ in each], [duration for _, duration in each], image


def iter_of(image: Image.Image) -> ImageSequence.Iterator:
    return ImageSequence.Iterator(image)


def test_frames_come_in_order_the_last_stands_longer_and_it_begins_again(tmp_path):
    levels = [20, 90, 160, 230]
    write_animation([page(level) for level in levels], tmp_path / "new" / "a.gif")
    found, durations, image = frames(tmp_path / "new" / "a.gif")
    assert [round(float(pixels[:, 35:].mean()), -1) for pixels in found] == pytest.approx(levels, abs=20)
    assert np.diff([pixels[:, 35:].mean() for pixels in found]).min() > 30
    assert durations == [700, 700, 700, 3000] and image.info["loop"] == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.gif"]


def test_what_stays_the_same_does_not_flicker(tmp_path):
    write_animation([page(level) for level in (0, 90, 255)], tmp_path / "a.gif")
    found, _, _ = frames(tmp_path / "a.gif")
    assert all(np.array_equal(pixels[:, :30], found[0][:, :30]) for pixels in found)


def test_a_smaller_frame_is_filled_up(tmp_path):
    write_animation([page(10), page(200, size=(80, 20))], tmp_path / "a.gif")
    found, _, _ = frames(tmp_path / "a.gif")
    assert [pixels.shape for pixels in found] == [(40, 80, 3)] * 2
    assert (found[1][25:] > 240).all()


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "a.gif").write_bytes(b"old")

    original = Image.Image.save

    def half(self, path, *args, **options):
        if not str(path).endswith(".tmp"):
            return original(self, path, *args, **options)
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(MAEError, match=r"a\.gif: No space left"):
        write_animation([page(0), page(9)], tmp_path / "a.gif")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]
    assert (tmp_path / "a.gif").read_bytes() == b"old"


def test_a_frame_shows_input_masked_and_reconstruction(tmp_path, monkeypatch, blocky_images):
    seen = []
    monkeypatch.setattr("mae.report.figures.panels.write_sheet", lambda columns, **told: seen.append((columns, told)))
    torch.manual_seed(0)
    model = create_model("mae_vit_lesson_patch4", img_size=32, embed_dim=32, depth=1, decoder_depth=1)
    images = blocky_images()
    views = reconstruct(model, images, model.plan(images))
    draw = partial(draw_frame, images=images, views=views, notes={}, mean=(0.5,) * 3, std=(0.25,) * 3, title="Step 3")
    draw(tmp_path / "f.png")
    ((columns, told),) = seen
    assert [column.name for column in columns] == ["input", "masked", "reconstruction"]
    assert "no masked pixel is read" in " ".join(told["caption"]) and "leaky" not in " ".join(told["caption"])
    assert told["title"] == "Step 3" and told["path"] == tmp_path / "f.png"
