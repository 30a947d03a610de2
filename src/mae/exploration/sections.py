"""The sections of the page, in the order of reading.

A section is a function of an `ExploreRun`. It gives the `Section` that is shown, or None where it does not apply, such
as learning dynamics to a model's file. Its pictures are PNG files that it writes into `ExploreRun.pictures`.
"""

from collections.abc import Callable

from mae.exploration.alike_images import nearest_images, nearest_patches
from mae.exploration.embedding_map import embedding_map
from mae.exploration.explored import ExploreRun
from mae.exploration.unusual_images import duplicates, odd_images
from mae.report.html.page import Section

SectionFunction = Callable[[ExploreRun], Section | None]

SECTIONS: tuple[SectionFunction, ...] = (embedding_map, nearest_images, nearest_patches, odd_images, duplicates)
