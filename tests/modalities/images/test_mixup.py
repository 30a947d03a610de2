"""Erasing against a loop and its distribution; mixup and cutmix against their definitions and timm's targets."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, ks_2samp, kstest
from timm.data.random_erasing import RandomErasing

from mae.modalities.images.mixup import erase, mix
from mae.randomness import Stream, normal, sample_keys, uniform


def batch(count: int = 12, height: int = 14, width: int = 10) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_erasing_is_what_a_loop_over_its_definition_gives():
    images, keys = batch(60), sample_keys(2, 0, torch.arange(60))
    before = images.clone()
    found = erase(images, keys, probability=0.6)
    erased = 0
    for image, key, result in zip(images, keys, found, strict=True):
        numbers = uniform(key.reshape(1), 23, Stream.ERASE)[0].tolist()
        expected = image.clone()
        if numbers[22] < 0.6:
            for area_at, ratio_at in zip(numbers[:10], numbers[10:20], strict=True):
                area = 140 * (0.02 + (1 / 3 - 0.02) * area_at)
                aspect = math.exp(math.log(0.3) * (1 - 2 * ratio_at))
                tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
                if tall < 14 and wide < 10:
                    top, left = int(numbers[20] * (15 - tall)), int(numbers[21] * (11 - wide))
                    noise = normal(key.reshape(1), 420, Stream.ERASE_NOISE).view(3, 14, 10)
                    there = slice(top, top + tall), slice(left, left + wide)
                    expected[:, *there] = noise[:, *there]
                    erased += 1
                    break
        assert torch.equal(result, expected)
    assert 20 < erased < 50 and torch.equal(images, before)


def test_erased_areas_and_shapes_are_distributed_as_timms():
    count, side = 2000, 32
    ours = erase(torch.zeros(count, 1, side, side), sample_keys(0, 0, torch.arange(count)))
    timms = RandomErasing(0.25, mode="pixel", device="cpu")
    theirs = torch.zeros(count, 1, side, side)
    timms(theirs)
    measures = []
    for images in (ours, theirs):
        inside = images[:, 0] != 0
        inside = inside[inside.any(dim=(1, 2))]
        assert abs(len(inside) / count - 0.25) < 0.04
        height, width = inside.any(dim=2).sum(dim=1).numpy(), inside.any(dim=1).sum(dim=1).numpy()
        top, left = (inside.any(dim=axis).int().argmax(dim=1).numpy() for axis in (2, 1))
        measures.append([height * width, height / width, top, left])
        assert images[images != 0].std().item() == pytest.approx(1, abs=0.02)
    for mine, timms_own in zip(*measures, strict=True):
        assert ks_2samp(mine, timms_own).pvalue > 1e-3


def test_an_image_is_erased_the_same_way_in_any_batch():
    images, keys = batch(), sample_keys(0, 3, torch.arange(12))
    before = torch.get_rng_state()
    whole = erase(images, keys, probability=1.0)
    for part in (slice(0, 5), slice(5, 12)):
        assert torch.equal(erase(images[part], keys[part], probability=1.0), whole[part])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(not torch.equal(old, new) for old, new in zip(images, whole, strict=True))
    assert torch.equal(erase(images, keys, probability=0.0), images)


def test_an_image_too_small_for_any_rectangle_is_kept():
    images = batch(8, 1, 1)
    assert torch.equal(erase(images, sample_keys(0, 0, torch.arange(8)), probability=1.0), images)


def mixed(seed: int, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images whose pixels all hold their label, what is made of them, and the targets; labels are 0 to 3."""
    labels = torch.arange(4)
    images = labels.float().reshape(4, 1, 1, 1).expand(4, 1, 16, 12).contiguous()
    found, targets = mix(images, labels, num_classes=4, seed=seed, **options)
    assert torch.equal(images[:, 0, 0, 0], labels.float())
    return images, found, targets


@pytest.mark.parametrize("switch", [0.0, 0.5, 1.0])
def test_targets_are_the_shares_of_what_is_shown(switch):
    for seed in range(40):
        _, found, targets = mixed(seed, switch=switch)
        assert targets.shape == (4, 4) and torch.allclose(targets.sum(dim=1), torch.ones(4))
        # The mean of an image is the mean of its labels, by mixup's weights and by cutmix's areas alike.
        assert torch.allclose(found.mean(dim=(1, 2, 3)), targets @ torch.arange(4.0), atol=1e-5)
        for row in range(4):
            assert (targets[row].nonzero().squeeze(1) - row).remainder(4).tolist() in ([0], [0, 3], [3], [3, 0])
        shares = torch.stack([targets[row, row] for row in range(4)])
        assert torch.allclose(shares, shares[0].expand(4))


def test_cutmix_pastes_one_rectangle_whose_area_is_the_weight():
    cut = 0
    for seed in range(60):
        images, found, targets = mixed(seed, switch=1.0)
        pasted = (found != images)[:, 0]
        rows, columns = pasted.any(dim=2), pasted.any(dim=1)
        assert torch.equal(pasted, rows.unsqueeze(2) & columns.unsqueeze(1))
        assert torch.allclose(pasted.float().mean(dim=(1, 2)), 1 - targets.diagonal(), atol=1e-6)
        cut += bool(pasted.any())
    assert cut > 40


def test_mixup_shares_follow_its_beta_distribution():
    shares = np.array([mixed(seed, switch=0.0)[2][0, 0].item() for seed in range(1500)])
    assert kstest(shares, beta(0.8, 0.8).cdf).pvalue > 1e-3
    assert kstest(shares, beta(0.5, 0.5).cdf).pvalue < 1e-6
    narrow = np.array([mixed(seed, switch=0.0, mixup=5.0)[2][0, 0].item() for seed in range(300)])
    assert kstest(narrow, beta(5, 5).cdf).pvalue > 1e-3


def test_cutmix_shares_are_uniform_but_for_the_images_edge():
    expected = np.random.default_rng(0)
    simulated, found = [], [mixed(seed, switch=1.0)[2][0, 0].item() for seed in range(1500)]
    for _ in range(6000):
        half = 0.5 * math.sqrt(1 - expected.uniform())
        tall, wide = int(half * 16), int(half * 12)
        row, column = expected.integers(16), expected.integers(12)
        height = min(row + tall, 16) - max(row - tall, 0)
        simulated.append(1 - height * (min(column + wide, 12) - max(column - wide, 0)) / 192)
    assert ks_2samp(np.round(found, 4), np.round(simulated, 4)).pvalue > 1e-3


def test_the_switch_is_a_fair_coin():
    mixtures = [mixed(seed)[1] for seed in range(300)]
    assert 100 < sum(torch.equal(found, found.round()) for found in mixtures) < 200


def test_mixing_depends_on_the_seed_alone():
    before = torch.get_rng_state()
    first = [mixed(seed) for seed in range(20)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    for seed in reversed(range(20)):
        for one, again in zip(first[seed], mixed(seed), strict=True):
            assert torch.equal(one, again)
    assert len({targets.numpy().tobytes() for _, _, targets in first}) > 15


def test_a_batch_of_one_is_kept():
    image = batch(1)
    found, target = mix(image, torch.tensor([2]), num_classes=3, seed=0)
    assert found is image and target.tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_devices_agree():
    images, keys, labels = batch(64), sample_keys(0, 0, torch.arange(64)), torch.arange(64) % 7
    state = torch.cuda.get_rng_state()
    assert torch.allclose(erase(images.cuda(), keys).cpu(), erase(images, keys), atol=1e-5)
    for seed in range(10):
        here = mix(images, labels, num_classes=7, seed=seed)
        there = mix(images.cuda(), labels.cuda(), num_classes=7, seed=seed)
        for one, other in zip(here, there, strict=True):
            assert torch.allclose(other.cpu(), one, atol=1e-6)
    assert torch.equal(torch.cuda.get_rng_state(), state)
