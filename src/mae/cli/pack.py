"""`mae pack SOURCE DEST` and `mae pack verify DEST`."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from mae.errors import Stopped, UsageError
from mae.options import shown

if TYPE_CHECKING:
    from rich.console import Console

    from mae.data.packs.encodings import PackForm
    from mae.data.packs.writer import PackResult

_SHOWN = 20
_UNREAD = {
    "alpha": "some files label their last band alpha, which is composited over white. To keep it as a channel, name "
    "all channels in a channels.txt beside the images; with --keep the files are unchanged, and --in-chans decides "
    "later",
    "pages": "some files are TIFFs with several pages, of which only the first is read. Put bands into one page "
    "(tifffile: photometric='minisblack', planarconfig='separate' or 'contig') and each image of a stack into its own "
    "file",
}
_VERIFY = "verify"


def run(args: list[str]) -> int:
    """Pack, or verify a pack."""
    if args[:1] == [_VERIFY]:
        return tyro.cli(verify, args=args[1:], prog=f"mae pack {_VERIFY}")
    return tyro.cli(pack, args=args, prog="mae pack")


def pack(
    source: Annotated[str, tyro.conf.Positional],
    dest: Annotated[Path, tyro.conf.Positional],
    short_side: Annotated[int | None, shown("384", "PIXELS")] = None,
    quality: Annotated[int | None, shown("90, and small JPEGs as they are", "1..100")] = None,
    keep: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    raw: Annotated[int | None, shown("no", "PIXELS")] = None,
    per_shard: int = 2048,
    workers: Annotated[int | None, shown("one a core", "N")] = None,
    max_unreadable: float = 0.001,
    data_root: Path = Path("data"),
) -> int:
    """Write images into a few large files, smaller and faster to read. Resumes when you rerun the same command.

    'mae pack verify DEST' verifies every byte of a pack.

    Args:
        source: a folder, a list file, a .zip, a pack or the name of a known set; its test split is packed too.
        dest: a new folder.
        short_side: JPEG whose shorter side has at most this many pixels.
        quality: encode every image anew at this JPEG quality: small files that came at a higher one are read faster.
        keep: keep the original files.
        raw: decoded pixels, the shorter side at most this many: fastest and largest.
        per_shard: images a file.
        workers: number of processes.
        max_unreadable: fraction of the images, 0 to 1, that may be broken; they are left out and listed in report.json.
        data_root: where known data sets are.
    """
    form = _form(short_side, quality, keep, raw)

    from rich.console import Console

    from mae.data.packs import writer as packing

    console = Console()
    try:
        with _bar(console) as progress:
            result = packing.pack(
                source,
                dest,
                form=form,
                per_shard=per_shard,
                workers=workers,
                max_unreadable=max_unreadable,
                data_root=data_root,
                progress=progress,
            )
    except KeyboardInterrupt as stop:
        by = stop.by if isinstance(stop, Stopped) else signal.SIGINT
        raise Stopped("stopped; rerun the same command to resume", by=by) from stop
    _tell(console, result)
    return 0


def verify(dest: Annotated[str, tyro.conf.Positional]) -> int:
    """Verify every byte of a pack against its index and checksums; prints one line per fault.

    Args:
        dest: the pack.
    """
    from rich.console import Console

    from mae.data.packs.verify import verify_pack
    from mae.data.sources.open import stored

    console, storage, faults = Console(), stored(dest), 0
    for fault in verify_pack(storage):
        faults += 1
        _print(console, fault)
    place = storage.place
    _print(console, f"{place}: {faults:,} fault{'s' * (faults != 1)}" if faults else f"{place} is intact")
    return 1 if faults else 0


def _form(short_side: int | None, quality: int | None, keep: bool, raw: int | None) -> "PackForm":
    """The encoding given by the options.

    Raises:
        UsageError: several encodings.
    """
    jpeg = short_side is not None or quality is not None
    if jpeg + keep + (raw is not None) > 1:
        raise UsageError("--short-side with --quality, --keep and --raw exclude one another; give one of the three")

    from mae.data.packs.encodings import Kept, Raw, ShortSide

    if keep:
        return Kept()
    if raw is not None:
        return Raw(side=raw)
    given = {"side": short_side, "quality": quality}
    return ShortSide(**{name: value for name, value in given.items() if value is not None})


@contextmanager
def _bar(console: "Console") -> "Iterator[Callable[[int, int], None]]":
    """A bar that starts with the first images: its thread must not exist yet when processes are forked."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("packing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("packing")

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


def _tell(console: "Console", result: "PackResult") -> None:
    for left_out in result.left_out[:_SHOWN]:
        _print(console, f"left out: {left_out.reason}")
    if len(result.left_out) > _SHOWN:
        _print(console, f"and {len(result.left_out) - _SHOWN:,} more, see {result.folder / 'report.json'}")
    for name in sorted(result.unread):
        _print(console, _UNREAD[name])
    size = f"{result.images:,} images, {result.num_bytes / 1e6:,.1f} MB"
    _print(console, f"{result.folder} {'was packed already' if result.was_there else 'is packed'}: {size}")


def _print(console: "Console", text: str) -> None:
    from mae.text import visible

    console.print(visible(text), soft_wrap=True, highlight=False, markup=False)
