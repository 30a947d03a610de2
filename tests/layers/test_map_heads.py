"""UPerNet against transformers', its pyramid's sizes, and normalisation over processes."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from mae.layers.map_heads import LinearMapHead, UPerNetHead, resized

DIM, CHANNELS, CLASSES = 8, 12, 5


def randomised(module: nn.Module) -> nn.Module:
    """Every weight and statistic random: none can hide behind a zero or a one."""
    generator = torch.Generator().manual_seed(0)
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data.copy_(0.2 + 0.3 * torch.rand(tensor.shape, generator=generator))
    return module.eval()


def head() -> UPerNetHead:
    found = randomised(UPerNetHead(DIM, CHANNELS, CLASSES))
    assert isinstance(found, UPerNetHead)
    return found


def maps(rows: int = 7, columns: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, DIM, rows, columns, generator=generator) for _ in range(4)]


def test_the_same_weights_in_transformers_give_the_same_numbers():
    upernet = pytest.importorskip("transformers.models.upernet")
    ours = head()
    config = upernet.UperNetConfig(hidden_size=CHANNELS, pool_scales=[1, 2, 3, 6], num_labels=CLASSES)
    theirs = upernet.modeling_upernet.UperNetHead(config, in_channels=[DIM] * 4).eval()
    pairs = [
        *zip([block for block in theirs.psp_modules.blocks], ours.pool, strict=True),
        (theirs.bottleneck, ours.coarsest),
        *zip(theirs.lateral_convs, ours.lateral, strict=True),
        *zip(theirs.fpn_convs, ours.smooth, strict=True),
        (theirs.fpn_bottleneck, ours.fuse),
    ]
    for other, own in pairs:
        conv = [each for each in other.modules() if isinstance(each, nn.Conv2d)]
        norm = [each for each in other.modules() if isinstance(each, nn.BatchNorm2d)]
        assert len(conv) == len(norm) == 1
        conv[0].load_state_dict(own.conv.state_dict())
        norm[0].load_state_dict(own.norm.state_dict())
    theirs.classifier.load_state_dict(ours.classes.state_dict())
    with torch.no_grad():
        found, expected = ours(maps()), theirs(ours.pyramid(maps()))
    assert found.shape == (2, CLASSES, 28, 20) and float(found.std()) > 1e-3
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns", "half"), [(7, 5, (4, 3)), (14, 14, (7, 7)), (1, 3, (1, 2))])
def test_the_pyramid_has_four_sizes(rows: int, columns: int, half: tuple[int, int]):
    sizes = [tuple(found.shape[2:]) for found in head().pyramid(maps(rows, columns))]
    assert sizes == [(4 * rows, 4 * columns), (2 * rows, 2 * columns), (rows, columns), half]


def test_the_linear_head_is_batch_norm_and_a_linear_layer_of_each_place():
    linear = randomised(LinearMapHead(2 * DIM, CLASSES))
    assert isinstance(linear, LinearMapHead)
    both = torch.cat(maps()[:2], dim=1)
    mean, variance = linear.norm.running_mean, linear.norm.running_var
    assert mean is not None and variance is not None
    place = (both[:, :, 3, 2] - mean) / (variance + linear.norm.eps).sqrt() * linear.norm.weight + linear.norm.bias
    expected = place @ linear.classes.weight[:, :, 0, 0].T + linear.classes.bias
    with torch.no_grad():
        assert_close(linear(maps()[:2])[:, :, 3, 2], expected)


def test_the_linear_head_begins_as_dinov3s():
    torch.manual_seed(0)
    fresh = LinearMapHead(200, 50)
    weights = fresh.state_dict()
    assert abs(float(weights["classes.weight"].std()) - 0.01) < 5e-4 and not weights["classes.bias"].any()
    assert fresh.dropout.p == 0.1 and resized(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 6, 4)).shape == (1, 1, 6, 4)
