"""The sections of the page, in the order of reading.

A section is a function of an `ExploreRun`. It gives the `Section` that is shown, or None where it does not apply, such
as learning dynamics to a model's file. Its pictures are PNG files that it writes into `ExploreRun.pictures`.
"""

from collections.abc import Callable

from mae.exploration.alike_images import nearest_images, nearest_patches
from mae.exploration.attention_pictures import attention_pictures
from mae.exploration.dynamics_sections import (
    attention_over_time,
    errors_by_wavelength,
    layers_over_time,
    patch_colours_over_time,
    weights_over_time,
)
from mae.exploration.embedding_map import embedding_map
from mae.exploration.explored import ExploreRun
from mae.exploration.mask_advice import masks_against_data
from mae.exploration.unusual_images import duplicates, odd_images
from mae.report.html.page import Section

SectionFunction = Callable[[ExploreRun], Section | None]

SECTIONS: tuple[SectionFunction, ...] = (
    embedding_map,
    nearest_images,
    nearest_patches,
    odd_images,
    duplicates,
    attention_pictures,
    patch_colours_over_time,
    layers_over_time,
    attention_over_time,
    errors_by_wavelength,
    masks_against_data,
    weights_over_time,
)
