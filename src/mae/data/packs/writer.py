"""Writing a pack: many images in a few large files with random access; see docs/reference/pack-format.md.

Shards are written by several processes. Finished shards are kept, so an interrupted pack resumes; the bytes are the
same however often that happens and however many processes there are.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mae.contention import num_cores
from mae.data.decode.limits import check_workers
from mae.data.packs.encodings import PackForm, ShortSide
from mae.data.packs.inputs import PackInput, common_names, open_input
from mae.data.packs.shard import Job, LeftOut, Record, first_broken, write_file
from mae.data.packs.workers import Progress, pack_shards
from mae.data.remote.storage import MANIFEST, MAX_MANIFEST, LocalStorage
from mae.data.sources.pack_format import REPORT, WORKING, Manifest, PackSourceEntry, read_manifest
from mae.errors import MAEError, UsageError
from mae.randomness import FIXED_EPOCH, permutation
from mae.records import check_folder, read_json, write_json

_ORDER_SEED = 0
_LOOKED_AT = 256  # images whose headers give the channel names
_MAX_PER_SHARD = 1_000_000
_ENTRY_BYTES = 512  # of a shard in pack.json, at most
_PATIENCE = 10.0  # seconds; the processes of a killed pack end within them
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """A complete pack.

    Attributes:
        folder: where it is.
        images: how many it holds.
        num_bytes: of its tars.
        left_out: what could not be used; for a pack that existed see its `report.json`.
        was_there: whether it was complete before.
        unread: what of the files is not read, from the headers of some: see `common_names`; unknown for a pack that
            existed.
    """

    folder: Path
    images: int
    num_bytes: int
    left_out: tuple[LeftOut, ...]
    was_there: bool
    unread: frozenset[str] = frozenset()


def pack(
    source: str | Path,
    folder: str | Path,
    *,
    form: PackForm | None = None,
    per_shard: int = 2048,
    workers: int | None = None,
    max_unreadable: float = 0.001,
    data_root: str | Path = "data",
    progress: Progress | None = None,
) -> PackResult:
    """Writes the images of a source into a pack; does what the command `mae pack` does.

    Args:
        source: see `mae.data.sources.open.open_source`; a test split is packed too.
        folder: a new one, or one with the same pack, unfinished.
        form: how images are encoded; None: `ShortSide()`.
        per_shard: images a shard.
        workers: processes; None: one a core.
        max_unreadable: fraction of the images, 0 to 1, that may be unusable.
        data_root: where known data sets are.
        progress: see `Progress`.

    Raises:
        UsageError: the folder holds something else, or an image cannot be encoded so.
        MAEError: more unusable images than allowed, or a full disk; finished shards are kept.
    """
    root, chosen = Path(folder), form or ShortSide()
    _check(per_shard, workers, max_unreadable)
    images = open_input(str(source), data_root=Path(data_root))
    _check_place(root, images)
    options = {**chosen.to_json(), "per_shard": per_shard}
    if (root / MANIFEST).is_file():
        return _existing(root, options, images)
    with _exclusive(root), _unbegun_removed(root):
        if (root / MANIFEST).is_file():  # by the process that was waited for
            return _existing(root, options, images)
        manifest, left_out, unread = _written(
            root,
            images,
            chosen,
            options,
            workers=workers or num_cores(),
            max_unreadable=max_unreadable,
            progress=progress or (lambda done, total: None),
        )
    shutil.rmtree(root / WORKING, ignore_errors=True)
    return replace(_result(root, manifest, left_out, was_there=False), unread=unread)


def _written(
    root: Path,
    images: PackInput,
    form: PackForm,
    options: dict[str, str | int],
    *,
    workers: int,
    max_unreadable: float,
    progress: Progress,
) -> tuple[Manifest, tuple[LeftOut, ...], frozenset[str]]:
    """Every file of the pack, `pack.json` last."""
    order = permutation(_ORDER_SEED, FIXED_EPOCH, len(images)).numpy()
    channels, nodata, unread = common_names(images, order[:_LOOKED_AT].tolist())
    fingerprint = images.fingerprint()
    _begin(root, {"form": options, "fingerprint": fingerprint, "version": images.version()})
    job = Job(
        images=images,
        form=form,
        order=order,
        per_shard=int(options["per_shard"]),
        channels=channels,
        nodata=nodata,
        folder=root,
    )
    if job.num_shards * _ENTRY_BYTES > MAX_MANIFEST:
        fewest = -(-len(images) * _ENTRY_BYTES // MAX_MANIFEST)
        raise UsageError(
            f"--per-shard is {job.per_shard}, which makes {job.num_shards:,} shards; expected {fewest:,} images or more"
        )

    def check(records: Sequence[Record]) -> None:
        _check_share(_all_left_out(records), job, max_unreadable)

    records = pack_shards(job, workers=workers, check=check, progress=progress)
    left_out = _all_left_out(records)
    _write_report(job, left_out)
    manifest = Manifest(
        form=options,
        source=PackSourceEntry(name=images.name, fingerprint=fingerprint),
        images=_counted(job, records, left_out),
        channel_names=channels,
        nodata=nodata,
        shards=tuple(record.shard for record in records),
        left_out=len(left_out),
    )
    write_file(root, MANIFEST, manifest.to_bytes())
    return manifest, left_out, unread


def _all_left_out(records: Sequence[Record]) -> tuple[LeftOut, ...]:
    return tuple(each for record in records for each in record.left_out)


def _check_share(left_out: tuple[LeftOut, ...], job: Job, max_unreadable: float) -> None:
    if len(left_out) <= max_unreadable * len(job.order):
        return
    _write_report(job, left_out)
    shown = "; ".join(each.reason for each in left_out[:_SHOWN])
    raise MAEError(
        f"{job.images.name}: {len(left_out):,} of {len(job.order):,} images cannot be used, more than the allowed "
        f"fraction of {max_unreadable:g}: {shown}{'; and more' if len(left_out) > _SHOWN else ''}. "
        f"{job.folder / REPORT} lists them; to leave them out, raise --max-unreadable, which resumes from here"
    )


def _check(per_shard: int, workers: int | None, max_unreadable: float) -> None:
    if not 1 <= per_shard <= _MAX_PER_SHARD:
        raise UsageError(f"--per-shard is {per_shard}; expected 1 to {_MAX_PER_SHARD:,}")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is {workers}; expected 1 or more")
    check_workers(workers)
    if not 0 <= max_unreadable <= 1:
        raise UsageError(f"--max-unreadable is {max_unreadable}; expected a fraction, 0 to 1")


def _check_place(root: Path, images: PackInput) -> None:
    if re.match(r"[a-z0-9+]{2,}:/", str(root)):  # a path keeps one slash of a URL's two
        raise UsageError(f"{root} is not a local folder; write the pack to one and copy it there")
    if images.place is not None and root.resolve().is_relative_to(images.place.resolve()):
        raise UsageError(f"{root} is inside {images.place}, which is to be packed; give a folder outside it")
    check_folder(root, option="folder")
    try:
        others = [entry.name for entry in os.scandir(root) if entry.name != WORKING] if root.exists() else []
    except OSError as error:
        raise UsageError(f"{root} cannot hold a pack: {error.strerror}; give a new folder") from error
    if others and not ((root / MANIFEST).is_file() or (root / WORKING).is_dir()):
        raise UsageError(f"{root} holds {sorted(others)[0]!r} and is not a pack; give a new folder")


def _existing(root: Path, options: dict[str, str | int], images: PackInput) -> PackResult:
    """The pack that exists already."""
    place = LocalStorage(root=root)
    manifest = read_manifest(place.whole(MANIFEST, limit=MAX_MANIFEST), place=str(root))
    _check_options(root, {"form": manifest.form}, {"form": options})
    if manifest.source.fingerprint != images.fingerprint():
        raise UsageError(f"{root} is a pack of other images, or they have changed since; give a new folder")
    for shard in manifest.shards:
        if (path := first_broken(root, shard)) is not None:
            raise MAEError(
                f"{path} is missing or cut short; put it back ('mae pack verify {root}' checks all files), or delete "
                f"{root} and pack again"
            )
    shutil.rmtree(root / WORKING, ignore_errors=True)  # killed between the last two steps
    return _result(root, manifest, (), was_there=True)


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """One pack at a time in a folder."""
    (root / WORKING).mkdir(parents=True, exist_ok=True)
    try:
        # The processes of a killed pack may hold the lock for a moment longer.
        with FileLock(root / WORKING / "lock", timeout=_PATIENCE):
            yield
    except Timeout as error:
        raise MAEError(f"another process is packing into {root}; wait for it, or stop it") from error
    except FileNotFoundError as error:
        if (root / WORKING).is_dir():
            raise
        raise MAEError(f"another process has just ended its work in {root}; rerun the same command") from error


@contextmanager
def _unbegun_removed(root: Path) -> Iterator[None]:
    """What was refused before a shard was written leaves nothing: other options may be right for the same folder."""
    try:
        yield
    except BaseException:
        if not _has_shards(root):
            shutil.rmtree(root / WORKING, ignore_errors=True)
            with suppress(OSError):  # it goes where it is empty
                root.rmdir()
        raise


def _has_shards(root: Path) -> bool:
    """Whether a shard of an unfinished pack is done."""
    return any((root / WORKING).glob("shard-*.json"))


def _begin(root: Path, options: dict[str, Any]) -> None:
    """Records the options, or compares them with those of the shards that are done."""
    for rest in (root / WORKING).glob("shard-*.*.*"):  # an unfinished shard of a killed process
        rest.unlink()
    noted = root / WORKING / "options.json"
    if noted.is_file() and _has_shards(root):
        _check_options(root, read_json(noted), options)
    else:
        write_json(noted, options)


def _check_options(root: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if before.get("form") != now["form"]:
        raise UsageError(
            f"{root} was begun with {_shown(before.get('form'))}, not with {_shown(now['form'])}; give the same "
            "options or a new folder"
        )
    if before != now:
        raise UsageError(f"the images have changed since {root} was begun; give a new folder, or delete this one")


def _shown(form: Any) -> str:
    """A form as `pack.json` has it, in words."""
    return ", ".join(f"{name} {value}" for name, value in form.items()) if isinstance(form, dict) else str(form)


def _counted(job: Job, records: Sequence[Record], left_out: tuple[LeftOut, ...]) -> int:
    count = sum(record.shard.images for record in records)
    if not count:
        raise MAEError(f"{job.images.name}: none of {len(job.order):,} images can be used: {left_out[0].reason}")
    return count


def _write_report(job: Job, left_out: tuple[LeftOut, ...]) -> None:
    """What was left out and why; like `pack.json` it does not tell the folders above the images."""
    above = "" if job.images.place is None else f"{job.images.place}{os.sep}"
    told = [{"name": each.name.removeprefix(above), "reason": each.reason.removeprefix(above)} for each in left_out]
    write_file(job.folder, REPORT, (json.dumps({"left_out": told}, indent=1) + "\n").encode())


def _result(root: Path, manifest: Manifest, left_out: tuple[LeftOut, ...], *, was_there: bool) -> PackResult:
    num_bytes = sum(shard.tar.bytes for shard in manifest.shards)
    return PackResult(folder=root, images=manifest.images, num_bytes=num_bytes, left_out=left_out, was_there=was_there)
