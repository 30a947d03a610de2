"""Whether a source still holds the images that a run was begun with."""

from collections.abc import Mapping
from typing import Any

from mae.data.dataset.images import ImageSet
from mae.errors import UsageError

_SHOWN = 3


def told_of(images: ImageSet) -> dict[str, Any]:
    """What a run's `data.json` keeps to know the images again; `content` is of a sample, a word an image."""
    return {
        "images": len(images),
        "fingerprint": images.fingerprint(),
        "listing": images.listing,
        "content": " ".join(each or "-" for each in images.sampled.contents),
        "version": images.version(),
    }


def check_same(images: ImageSet, found: Mapping[str, Any], *, source: str, begun: str) -> str:
    """Make sure that the images are those of a run.

    An image of the sample that can be read now and could not before, or the other way round, is another matter, which
    is counted where images are read.

    Args:
        images: as they are.
        found: what was told of them when the run was begun; see `told_of` and `read_image_facts`.
        source: what the user called them.
        begun: the folder of the run.

    Returns:
        What a reader should know, though it need not mean a change; mostly nothing.

    Raises:
        UsageError: other names, sizes or checksums, or other content in the sample.
    """
    count, before = found["images"], found["content"].split()
    then = f"than when the run in {begun} was begun"
    if found["listing"] != images.listing or len(before) != len(images.sampled.contents):
        raise UsageError(
            f"{source} holds other images {then} ({count} then, {len(images)} now; their names, sizes, "
            "checksums or channels differ); put them back, or start a new run"
        )
    now = images.sampled
    changed = [
        images.item_name(number)
        for number, one, other in zip(now.numbers, before, now.contents, strict=True)
        if one != other and one != "-" and other
    ]
    if changed:
        shown = ", ".join(changed[:_SHOWN]) + (" and others" if len(changed) > _SHOWN else "")
        raise UsageError(
            f"{source} holds other images {then}: of {len(before):,} whose content is compared {len(changed):,} were "
            f"changed in place, {shown}; put them back, or start a new run"
        )
    if found["version"] == images.version() or len(before) == len(images):
        return ""
    return (
        f"place or times of the files differ from when the run was begun; {len(before):,} of {len(images):,}, whose "
        "content is compared, are the same"
    )
