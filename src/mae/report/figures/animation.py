"""A sequence of sheets as a GIF."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mae.report.figures.canvas import whole_file

FRAME_MS, LAST_FRAME_MS = 700, 3000
_COLOURS = 256  # the maximum of a GIF


def write_animation(draw: Sequence[Callable[[Path], object]], path: Path) -> None:
    """Write a looping GIF; its last frame lasts 3 seconds, the others 0.7.

    All frames share one palette, so that constant parts do not flicker; smaller frames are padded with white.

    Args:
        draw: for each frame a function that writes it as a PNG.
        path: the GIF; its folder is created, an older file is replaced atomically.

    Raises:
        MAEError: the file cannot be written.
    """
    with TemporaryDirectory(prefix="mae-frames-") as folder:
        frames = [_drawn(one, Path(folder) / "frame.png") for one in draw]
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    frames = [_filled_up(frame, size) for frame in frames]
    # From the first and last frames only: the colours of the others are close enough.
    ends = Image.new("RGB", (size[0], 2 * size[1]))
    ends.paste(frames[0], (0, 0))
    ends.paste(frames[-1], (0, size[1]))
    palette = ends.quantize(_COLOURS)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    with whole_file(path, what="animation") as unfinished:
        frames[0].save(
            unfinished,
            format="GIF",
            save_all=True,
            append_images=frames[1:],
            duration=durations,
            loop=0,
            optimize=False,
        )


def _drawn(draw: Callable[[Path], object], path: Path) -> Image.Image:
    draw(path)
    with Image.open(path) as image:
        return image.convert("RGB")


def _filled_up(frame: Image.Image, size: tuple[int, int]) -> Image.Image:
    whole = Image.new("RGB", size, "white")
    whole.paste(frame, (0, 0))
    return whole
