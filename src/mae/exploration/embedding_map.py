"""The map of the embedding: images by their features on a plane, to be looked at in a browser."""

from base64 import b64encode
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from mae.exploration.explored import ExploreRun
from mae.exploration.projection import project
from mae.exploration.thumbnails import Thumbnails, make_thumbnails
from mae.report.figures.map import draw_map
from mae.report.figures.tones import colour_table
from mae.report.html.page import Interactive, Section
from mae.text import visible

if TYPE_CHECKING:
    from markupsafe import Markup

_PALETTE = "tab20"
_STRONG, _PALE = (0, 2, 4, 6, 8, 10, 12, 16, 18), (1, 3, 5, 7, 9, 11, 13, 17, 19)
"""Places in it, without those of its greys: all that has no colour of its own is grey."""
_LARGEST = 65535
_SCRIPTS = ("map_points.js", "map.js")
_COSINE_STEPS = 10_000


def embedding_map(run: ExploreRun) -> Section:
    """All images on a plane, those alike to the model near each other, to be searched and zoomed into."""
    places, meaning = project(run.centred, run.projection, seed=run.seed)
    thumbnails = make_thumbnails(run.images, run.task.extractor.preprocessing)
    places = _in_unit_square(places)
    picture = run.pictures / "map.png"
    colours = _class_colours(run.row_labels, len(run.class_names))
    draw_map(
        places,
        thumbnails.pictures,
        labels=run.row_labels,
        class_names=run.class_names,
        colours=colours,
        title="Map of the images by their features",
        caption=meaning,
        path=picture,
    )
    html = _html(run, side=thumbnails.side, picture=picture.read_bytes())
    static = files("mae.exploration") / "static"
    return Section(
        title="Map of the images",
        text=meaning,
        interactive=Interactive(
            html=html,
            style=(static / "map.css").read_text(encoding="ascii"),
            script="\n".join((static / name).read_text(encoding="ascii") for name in _SCRIPTS),
            data_id="map-data",
            data=_data(run, places, thumbnails, colours),
        ),
    )


def _class_colours(labels: Int64[Tensor, " n"], num_classes: int) -> dict[int, Float32[Tensor, "3"]]:
    """The colours of the classes that have most images, by their numbers; the strong ones first, then pale ones."""
    colours = colour_table(_PALETTE)[[*_STRONG, *_PALE]]
    counts = torch.bincount(labels[labels >= 0], minlength=num_classes)
    largest = counts.argsort(descending=True, stable=True)[: len(colours)]
    shown = [label for label in largest.tolist() if counts[label]]
    return dict(zip(shown, colours, strict=False))


def _html(run: ExploreRun, *, side: int, picture: bytes) -> "Markup":
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: imported only where a page is written
    from markupsafe import Markup

    pages = Environment(loader=PackageLoader("mae.exploration", "static"), autoescape=True, undefined=StrictUndefined)
    html = pages.get_template("map.html.j2").render(
        count=f"{len(run.names):,}",
        side=side,
        classes=bool(run.class_names),
        picture=b64encode(picture).decode("ascii"),
    )
    return Markup(html)


def _data(
    run: ExploreRun, places: Float32[Tensor, "n 2"], thumbnails: Thumbnails, colours: Mapping[int, Tensor]
) -> dict[str, object]:
    """What the script reads: numbers as little-endian integers in base64, classes of 32 bits and the others of 16."""
    cosines, neighbours = run.neighbours
    return {
        "names": run.names,
        "classes": [visible(name) for name in run.class_names],
        "colours": {str(label): _hex(colour) for label, colour in colours.items()},
        "labels": _packed(run.row_labels, "<i4"),
        "places": _packed((places * _LARGEST).round(), "<u2"),
        "neighbours": _packed(neighbours, "<u2"),
        "cosines": _packed((cosines * _COSINE_STEPS).round(), "<i2"),
        "atlas": thumbnails.atlas(),
        "side": thumbnails.side,
        "columns": thumbnails.columns,
    }


def _packed(values: Tensor, kind: str) -> str:
    return b64encode(values.numpy().astype(np.dtype(kind)).tobytes()).decode("ascii")


def _in_unit_square(places: Float32[Tensor, "n 2"]) -> Float32[Tensor, "n 2"]:
    """Moved and scaled alike in both directions into [0, 1], the shorter one centred; upwards is towards 0."""
    low, high = places.amin(dim=0), places.amax(dim=0)
    span = (high - low).amax().clamp(min=torch.finfo(torch.float32).tiny)
    unit = (places - (low + high) / 2) / span + 0.5
    return torch.stack([unit[:, 0], 1 - unit[:, 1]], dim=1).clamp(0, 1)


def _hex(colour: Float32[Tensor, "3"]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour.tolist())
