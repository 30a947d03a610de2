"""Which channels of a many-band image are shown as red, green and blue."""

import pytest
import torch

from mae.errors import UsageError
from mae.report.figures.tones import choose_tones, rgb_channels


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (["nir", "Red", "green", "BLUE"], (), (1, 2, 3)),
        (["B", "G", "R", "IR"], (), (2, 1, 0)),
        (["B01", "B02", "B03", "B04", "B08"], (), (3, 2, 1)),
        (["B2", "B3", "B4"], (), (2, 1, 0)),
        (["dapi", "actin", "tubulin", "er"], (), None),
        (None, (), None),
        (["dapi", "actin", "tubulin", "er"], ("er", "dapi", "Actin"), (3, 0, 1)),
        (["red", "green", "blue", "nir"], ("nir",), (3,)),
    ],
)
def test_channels_are_found_by_name(names, wanted, expected):
    assert rgb_channels(names, wanted) == expected


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (["a", "b", "c"], ("a", "b"), "--rgb names 2 channels; expected three"),
        (["a", "b", "c"], ("a", "b", "d"), "--rgb names 'd', and the channels are a, b, c"),
        (None, ("a",), "nothing names the channels"),
    ],
)
def test_names_that_are_not_there_are_refused(names, wanted, message):
    with pytest.raises(UsageError, match=message):
        rgb_channels(names, wanted)


def test_the_chosen_channels_are_painted_each_by_its_own_range():
    images = torch.rand(2, 5, 8, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 10.0, 100.0, 1000.0, 1e4]
    ).view(5, 1, 1)
    tones = choose_tones(images, (0.0,) * 5, (1.0,) * 5, (4, 2, 0))
    painted = tones.paint(images)
    for place, channel in enumerate((4, 2, 0)):
        low, high = (images[:, channel].quantile(share) for share in (0.01, 0.99))
        expected = ((images[:, channel] - low) / (high - low)).clamp(0, 1)
        torch.testing.assert_close(painted[..., place], expected)
    assert "channels 5, 3, 1 as red, green, blue of 5" in tones.notes[0]
    grey = choose_tones(images, (0.0,) * 5, (1.0,) * 5, (3,)).paint(images)
    assert torch.equal(grey[..., 0], grey[..., 2])
