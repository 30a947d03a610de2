"""What labelled images have in common, whatever their labels: sizes, EXIF data, copies, classes of both parts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mae.data.annotations.parts import Annotated
from mae.data.decode.image import decode, orientation
from mae.data.decode.limits import UnreadableImage
from mae.data.items import pixel_digest
from mae.data.sources.folder import FileSource
from mae.findings import Finding

SPOILT = 0.01
"""Share of objects or images from which a fault spoils what is trained on them; one among hundreds is drowned."""
COPIES = "copies in both parts"
"""The name of the check for test images that are trained on too."""
_SHOWN = 3
Level = Literal["note", "warn", "stop"]
"""How grave a fault is, see `Finding`."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """An image that was looked at.

    Attributes:
        name: its path.
        height: once turned as its EXIF data say.
        width: likewise.
        orientation: what these say, 1 to 8.
        digest: of its pixels.
    """

    name: str
    height: int
    width: int
    orientation: int
    digest: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.height, self.width


def look_at(source: FileSource) -> list[Seen | str]:
    """Each image, decoded once; what is wrong with it where it cannot be read."""

    def look(number: int) -> Seen | str:
        name = source.item_name(number)
        try:
            data = source.read(number)
            pixels = decode(data, name=name)
            turned = orientation(data, name=name)
        except UnreadableImage as error:
            return str(error)
        height, width = pixels.shape[:2]
        return Seen(name=name, height=height, width=width, orientation=turned, digest=pixel_digest([pixels]))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(look, range(len(source))))


def share_level(count: int, of: int) -> Level:
    """`stop` where a fault is in so many of all that it spoils training, else `warn`."""
    return "stop" if count > SPOILT * of else "warn"


def fault(name: str, found: Sequence[str], *, of: int, what: str, advice: str, level: Level | None = None) -> Finding:
    """A finding on some of many things; `ok` where `found` is empty.

    Args:
        name: of the check.
        found: the file of each that is at fault.
        of: how many were looked at.
        what: they are, as "boxes lie outside of their image".
        advice: what to do.
        level: None: by their share, see `share_level`.
    """
    if not found:
        return Finding(name=name, level="ok", value="none")
    files = list(dict.fromkeys(found))
    more = f" and {len(files) - _SHOWN:,} more files" if len(files) > _SHOWN else ""
    value = f"{len(found):,} of {of:,} {what}: {', '.join(files[:_SHOWN])}{more}"
    return Finding(name=name, level=level or share_level(len(found), of), value=value, advice=advice)


def unreadable(seen: Sequence[Seen | str]) -> Finding:
    """Images that cannot be read."""
    broken = [each for each in seen if isinstance(each, str)]
    advice = "repair or remove them with their labels: they are left out"
    return fault("unreadable images", broken, of=len(seen), what="images", advice=advice, level="warn")


def sizes(seen: Sequence[Seen | str], told: Sequence[tuple[int, int]], *, files: Sequence[str]) -> list[Finding]:
    """Labels for images of another size, or of the same image before its EXIF data turn it.

    Args:
        seen: the images.
        told: height and width that the labels of each are for; 0 where nothing tells them.
        files: of the labels of each.
    """
    wrong, sideways, turned = [], [], []
    for image, size, file in zip(seen, told, files, strict=True):
        if isinstance(image, str):
            continue
        differs = any(side and side != its for side, its in zip(size, image.size, strict=True))
        if differs and image.orientation > 4 and size[::-1] == image.size:
            sideways.append(image.name)
        elif differs:
            wrong.append(f"{file} ({size[0]} x {size[1]} for {image.height} x {image.width})")
        elif image.orientation > 1 and not (image.orientation > 4 and all(size)):
            turned.append(image.name)
    count = len(seen)
    found = [
        fault(
            "sizes",
            wrong,
            of=count,
            what="images have labels for another size",
            advice="export the labels for these images anew, or scale them: images are not resized to their labels",
            level="stop",
        ),
        fault(
            "EXIF",
            sideways,
            of=count,
            what="images are turned by their EXIF data, and their labels made before that",
            advice="save the images without that tag as they are stored, as with 'exiftool -Orientation= '",
            level="stop",
        ),
    ]
    if turned and not sideways:
        advice = "see in the picture whether the labels lie right; else save the images without that tag"
        found[1] = fault("EXIF", turned, of=count, what="images are turned by EXIF data", advice=advice, level="warn")
    return found


def copies(train: Sequence[Seen | str], test: Sequence[Seen | str]) -> list[Finding]:
    """Images with the same pixels in both parts, and within one."""
    first = {each.digest: each.name for each in train if isinstance(each, Seen)}
    both = [f"{each.name} = {first[each.digest]}" for each in test if isinstance(each, Seen) and each.digest in first]
    advice = "remove them from one part: what was learnt by heart is no result"
    found = [fault(COPIES, both, of=len(test), what="test images", advice=advice, level="stop")]
    within = Counter(each.digest for each in train if isinstance(each, Seen))
    extra = [digest for digest, count in within.items() if count > 1]
    named = [first[digest] for digest in extra for _ in range(within[digest] - 1)]
    advice = "keep one of each: copies count twice"
    found.append(fault("copies", named, of=len(train), what="training images", advice=advice, level="note"))
    return found


def in_both_parts(class_names: Sequence[str], train: np.ndarray, test: np.ndarray) -> Finding:
    """Classes that one part lacks.

    Args:
        class_names: the classes.
        train: how many objects or pixels of each class there are `[c]`.
        test: likewise.
    """
    cases: Mapping[str, np.ndarray] = {
        "never in the test part": (train > 0) & (test == 0),
        "in the test part alone": (train == 0) & (test > 0),
        "in neither part": (train == 0) & (test == 0),
    }
    told = [
        f"{', '.join(np.array(class_names, dtype=object)[which][:_SHOWN])}"
        f"{f' and {which.sum() - _SHOWN} more' if which.sum() > _SHOWN else ''} {where}"
        for where, which in cases.items()
        if which.any()
    ]
    if not told:
        return Finding(name="classes in both parts", level="ok", value=f"{len(class_names)} have both")
    lacking = cases["never in the test part"] | cases["in the test part alone"]
    advice = "move some images into the other part, or leave the class out: its result would be no number or 0"
    return Finding(
        name="classes in both parts", level="warn" if lacking.any() else "note", value="; ".join(told), advice=advice
    )


def without_labels(left: int, of: int, *, what: str) -> Finding:
    """Images that were left out or show nothing."""
    if not left:
        return Finding(name="images without labels", level="ok", value="none")
    return Finding(
        name="images without labels",
        level="note",
        value=f"{left:,} of {of:,} images {what}",
        advice="right where they show nothing to be found; else label or remove them",
    )


def names_of(split: Annotated) -> list[str]:
    """The paths of the images."""
    return [split.source.item_name(number) for number in range(len(split.source))]
