"""Changes of colour against torchvision's, as distributions and pixel by pixel."""

import pytest
import torch
from data.pictures import noise
from scipy.stats import ks_2samp
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from mae.errors import UsageError
from mae.modalities.images.crop import Augmentation, change_colours, colour_changes
from mae.randomness import sample_keys, view_keys

KEYS = sample_keys(3, 0, torch.arange(4000))
NAMES = ("brightness", "contrast", "saturation", "hue")


def image(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(noise(12, 10, 3, seed)).permute(2, 0, 1).contiguous()


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.5])
def test_factors_are_distributed_as_torchvisions(strength: float):
    jitter = v2.ColorJitter(*(0.8 * strength,) * 3, 0.2 * strength)
    theirs = [jitter.make_params([]) for _ in range(3000)]
    ours = [dict(changes) for changes in colour_changes(KEYS, Augmentation(color_jitter=strength)) if changes]
    assert len(ours) / len(KEYS) == pytest.approx(0.8, abs=0.02)
    for name in NAMES:
        found = [factors[name] for factors in ours]
        assert ks_2samp(found, [float(params[f"{name}_factor"]) for params in theirs]).pvalue > 1e-3
        low, high = getattr(jitter, name)
        assert low <= min(found) and max(found) <= high


def test_each_order_is_as_likely_as_any_other():
    orders = [
        tuple(name for name, _ in changes) for changes in colour_changes(KEYS, Augmentation(color_jitter=1)) if changes
    ]
    assert len(set(orders)) == 24
    assert max(orders.count(order) for order in set(orders)) < 2 * len(orders) / 24


def test_pixels_are_those_of_torchvision_with_the_same_parameters(monkeypatch: pytest.MonkeyPatch):
    jitter = v2.ColorJitter(0.8, 0.8, 0.8, 0.2)
    for seed, changes in enumerate(colour_changes(KEYS[:40], Augmentation(color_jitter=1))):
        if not changes:
            continue
        params = {f"{name}_factor": factor for name, factor in changes}
        params["fn_idx"] = torch.tensor([NAMES.index(name) for name, _ in changes])
        expected = jitter.transform(image(seed), params)
        found = change_colours(image(seed), changes)
        assert found.dtype == torch.uint8 and torch.equal(found, expected)
        assert not torch.equal(found, image(seed))


def test_a_share_is_made_grey_as_torchvision_does():
    changes = colour_changes(KEYS, Augmentation(grayscale=0.2))
    assert sum(map(bool, changes)) / len(KEYS) == pytest.approx(0.2, abs=0.02)
    grey = next(some for some in changes if some)
    assert torch.equal(change_colours(image(), grey), F.rgb_to_grayscale(image(), num_output_channels=3))
    both = colour_changes(KEYS, Augmentation(color_jitter=1, grayscale=0.2))
    assert [some[-1:] == [("saturation", 0.0)] for some in both] == [bool(some) for some in changes]
    assert all(colour_changes(KEYS[:50], Augmentation(grayscale=1)))


def test_a_change_depends_on_its_own_key_alone_and_views_differ():
    how = Augmentation(color_jitter=1, grayscale=0.2)
    together = colour_changes(KEYS[:50], how)
    assert all(colour_changes(KEYS[row : row + 1], how) == [together[row]] for row in range(50))
    views = colour_changes(view_keys(KEYS[:50], 2), how)
    assert sum(one == other for one, other in zip(views[::2], views[1::2], strict=True)) < 10


def test_without_it_nothing_is_changed():
    assert not Augmentation().changes_colours
    assert colour_changes(KEYS[:50], Augmentation()) == [[]] * 50


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"color_jitter": -0.1}, "color_jitter is -0.1; expected 0 to 2.5"),
        ({"color_jitter": 2.6}, "color_jitter is 2.6; expected 0 to 2.5"),
        ({"grayscale": 1.1}, "grayscale is 1.1; expected a share of the crops, 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, float], says: str):
    with pytest.raises(UsageError, match=says):
        Augmentation(**options)
