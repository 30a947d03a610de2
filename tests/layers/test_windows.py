"""Windows of a map, relative positions and the pyramid, against loops and timm."""

import pytest
import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.testing import assert_close

from mae.layers.drop_path import DropPath
from mae.layers.feature_pyramid import ChannelNorm, SimpleFeaturePyramid
from mae.layers.rel_pos import RelativePositions
from mae.layers.transformer import Block
from mae.layers.windows import MapAttention, MapBlock, join_windows, partition


def randomised(module: nn.Module) -> nn.Module:
    """Every weight random, so that none can hide behind a zero or a one."""
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.4)
    return module


@pytest.mark.parametrize("grid", [(6, 8), (7, 5), (2, 3), (4, 4)])
def test_windows_joined_again_are_the_map(grid: tuple[int, int]) -> None:
    x = torch.randn(2, *grid, 3)
    windows = partition(x, 4)
    assert windows.shape == (2 * -(-grid[0] // 4) * -(-grid[1] // 4), 4, 4, 3)
    assert_close(join_windows(windows, grid), x, rtol=0, atol=0)
    assert_close(windows.sum(), x.sum())  # filled up with zeros


def test_windows_lie_in_raster_order() -> None:
    x = torch.arange(5 * 6).reshape(1, 5, 6, 1).float()
    windows = partition(x, 3)
    assert windows[1, :, :, 0].tolist() == [[3, 4, 5], [9, 10, 11], [15, 16, 17]]
    assert windows[2, :, :, 0].tolist() == [[18, 19, 20], [24, 25, 26], [0, 0, 0]]


def by_hand(attention: MapAttention, x: Tensor) -> Tensor:
    """Attention of one window `[S, S, D]`, score by score."""
    side, dim, heads = x.shape[0], x.shape[2], attention.num_heads
    width = dim // heads
    tokens = x.reshape(-1, dim)
    query, key, value = attention.qkv(tokens).split(dim, dim=1)
    out = torch.zeros_like(tokens)
    for head in range(heads):
        q, k, v = (part[:, head * width : (head + 1) * width] for part in (query, key, value))
        scores = torch.zeros(len(tokens), len(tokens))
        for i in range(len(tokens)):
            for j in range(len(tokens)):
                scores[i, j] = q[i] @ k[j] / width**0.5
                if attention.rel_pos is not None:
                    dy, dx = i // side - j // side, i % side - j % side
                    scores[i, j] += q[i] @ attention.rel_pos.rows[dy + side - 1]
                    scores[i, j] += q[i] @ attention.rel_pos.columns[dx + side - 1]
        out[:, head * width : (head + 1) * width] = scores.softmax(dim=1) @ v
    return attention.proj(out).reshape(x.shape)


@pytest.mark.parametrize("positions", [None, (3, 3)])
def test_border_windows_attend_to_what_they_are_filled_up_with(positions: tuple[int, int] | None) -> None:
    attention = randomised(MapAttention(dim=8, num_heads=2, window=3, positions=positions))
    x = torch.randn(1, 4, 5, 8)
    found = attention.on_map(x)  # type: ignore[operator]
    filled = pad(x, (0, 0, 0, 1, 0, 2))[0]
    expected = torch.zeros(6, 6, 8)
    for row in (0, 3):
        for column in (0, 3):
            expected[row : row + 3, column : column + 3] = by_hand(  # type: ignore[arg-type]
                attention, filled[row : row + 3, column : column + 3]
            )
    assert_close(found[0], expected[:4, :5])


def test_relative_positions_are_those_of_a_double_loop_on_a_rectangle() -> None:
    height, width, dim = 3, 4, 5
    positions = randomised(RelativePositions(grid=(height, width), dim=dim))
    query = torch.randn(2, 2, height * width, dim)
    found = positions(query, (height, width))
    for q in range(height * width):
        for k in range(height * width):
            dy, dx = q // width - k // width, q % width - k % width
            table = positions.rows[dy + height - 1] + positions.columns[dx + width - 1]  # type: ignore[index]
            assert_close(found[:, :, q, k], query[:, :, q] @ table)


def test_relative_positions_of_another_grid_are_interpolated() -> None:
    positions = RelativePositions(grid=(3, 3), dim=1)
    nn.init.zeros_(positions.columns)
    positions.rows.data = torch.arange(5.0)[:, None]
    found = positions(torch.ones(1, 1, 5, 1), (5, 1))[0, 0]
    expected = nn.functional.interpolate(torch.arange(5.0)[None, None], size=9, mode="linear")[0, 0]
    assert_close(found[:, 0], expected[4:])  # key 0: the query's row less 0
    assert_close(found[0], expected[:5].flip(0))


def test_relative_positions_begin_without_an_effect() -> None:
    positions = RelativePositions(grid=(2, 2), dim=4)
    assert not positions(torch.randn(1, 2, 4, 4), (2, 2)).any()


@pytest.mark.parametrize("window", [0, 6, 9])
def test_a_block_whose_window_holds_the_map_is_a_plain_block(window: int) -> None:
    """A larger window is filled up, and what fills it is attended to: another result."""
    positions = (window, window) if window else (6, 6)
    ours = randomised(
        MapBlock(dim=8, num_heads=2, mlp_ratio=2.0, window=window, positions=positions, drop_path=DropPath(rate=0.0))
    )
    plain = Block(dim=8, num_heads=2, mlp_ratio=2.0)
    missing = ours.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["attn.rel_pos.rows", "attn.rel_pos.columns"]
    for name in missing:
        nn.init.zeros_(ours.get_parameter(name))
    nn.init.normal_(plain.attn.qkv.bias)
    ours.attn.qkv.bias = plain.attn.qkv.bias  # type: ignore[union-attr]
    x = torch.randn(2, 36, 8)
    difference = (ours(x, (6, 6)) - plain(x)).abs().max()
    assert (difference > 1e-3) if window == 9 else (difference < 1e-6)


@pytest.mark.parametrize("grid", [(4, 6), (5, 3)])
def test_the_pyramid_of_a_rectangle(grid: tuple[int, int]) -> None:
    pyramid = SimpleFeaturePyramid(dim=16, channels=8)
    maps = pyramid(torch.randn(2, 16, *grid))
    rows, columns = grid
    half = (rows // 2, columns // 2)
    assert {name: tuple(found.shape) for name, found in maps.items()} == {
        "0": (2, 8, 4 * rows, 4 * columns),
        "1": (2, 8, 2 * rows, 2 * columns),
        "2": (2, 8, rows, columns),
        "3": (2, 8, *half),
        "pool": (2, 8, -(-half[0] // 2), -(-half[1] // 2)),
    }
    assert_close(maps["pool"], maps["3"][:, :, ::2, ::2])
    convolutions = [name for name, _ in pyramid.named_parameters() if "lateral" in name or "output" in name]
    assert not any(name.endswith("0.bias") for name in convolutions)


def test_the_norm_over_channels_is_timms() -> None:
    ours, theirs = randomised(ChannelNorm(6)), LayerNorm2d(6, eps=1e-6)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 6, 3, 4)
    assert_close(ours(x), theirs(x))
