"""Cutting, joining and embedding patches, against loops and against a convolution."""

import pytest
import torch
from torch.testing import assert_close

from mae.errors import UsageError
from mae.modalities.images.patches import PatchEmbed, patch_grid, patchify, select_patches, unpatchify

SHAPES = [((3, 16, 16), (4, 4)), ((1, 8, 24), (8, 8)), ((13, 12, 20), (3, 5)), ((2, 6, 4), (1, 4)), ((4, 7, 5), (7, 5))]


def patches_by_loops(images: torch.Tensor, p: int, q: int) -> torch.Tensor:
    """Every value of every patch fetched one by one: row, column, then channel."""
    batch, channels, height, width = images.shape
    return torch.tensor(
        [
            [
                [float(image[c, r + i, s + j]) for i in range(p) for j in range(q) for c in range(channels)]
                for r in range(0, height, p)
                for s in range(0, width, q)
            ]
            for image in images
        ]
    )


@pytest.mark.parametrize(("shape", "patch"), SHAPES)
def test_patchify_matches_loops_and_unpatchify_inverts_it(shape: tuple[int, ...], patch: tuple[int, int]) -> None:
    images = torch.randn(2, *shape)
    patches = patchify(images, patch)
    assert torch.equal(patches, patches_by_loops(images, *patch))
    grid = patch_grid(shape[1], shape[2], patch)
    assert torch.equal(unpatchify(patches, grid, patch), images)


@pytest.mark.parametrize(("shape", "patch"), SHAPES)
def test_selected_patches_are_those_of_the_whole_grid(shape: tuple[int, ...], patch: tuple[int, int]) -> None:
    images = torch.randn(3, *shape)
    whole = patchify(images, patch)
    tokens = torch.stack([torch.randperm(whole.shape[1])[: max(1, whole.shape[1] // 2)] for _ in range(3)])
    some = patchify(images, patch, tokens)
    for image in range(3):
        assert torch.equal(some[image], whole[image, tokens[image]])


def test_no_tokens_are_no_patches() -> None:
    images, none = torch.randn(2, 3, 8, 12), torch.empty(2, 0, dtype=torch.int64)
    assert patchify(images, (4, 4), none).shape == (2, 0, 48)
    assert select_patches(images, (4, 4), none).shape == (2, 0, 3, 4, 4)


def test_channels_last_and_integer_images_are_cut_alike() -> None:
    images = torch.randint(0, 256, (2, 3, 8, 12), dtype=torch.uint8)
    as_stored = images.contiguous(memory_format=torch.channels_last)
    tokens = torch.tensor([[5, 0], [1, 2]])
    assert torch.equal(patchify(as_stored, (4, 4)), patchify(images, (4, 4)))
    assert torch.equal(select_patches(as_stored, (4, 4), tokens), select_patches(images, (4, 4), tokens))


@pytest.mark.parametrize(("shape", "patch"), SHAPES)
def test_embedding_is_the_convolution_it_stands_for(shape: tuple[int, ...], patch: tuple[int, int]) -> None:
    embed = PatchEmbed(patch_size=patch, in_chans=shape[0], embed_dim=10)
    images = torch.randn(2, *shape)
    kernel = embed.proj.weight.reshape(10, shape[0], *patch)
    expected = torch.nn.functional.conv2d(images, kernel, embed.proj.bias, stride=patch).flatten(2).transpose(1, 2)
    assert_close(embed(images), expected, rtol=1e-5, atol=1e-5)
    tokens = torch.stack([torch.randperm(expected.shape[1])[:1] for _ in range(2)])
    picked = expected.gather(1, tokens.unsqueeze(-1).expand(-1, -1, 10))
    assert_close(embed(images, tokens), picked, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "patch", "nearest"),
    [
        ((225, 224), (16, 16), "224x224 or 240x224"),
        ((30, 50), (16, 8), "16x48 or 32x56"),
        ((5, 16), (16, 16), "16x16"),
        ((0, 16), (16, 16), "16x16"),
    ],
)
def test_sides_that_do_not_fit_are_refused_with_the_nearest_sizes(
    size: tuple[int, int], patch: tuple[int, int], nearest: str
) -> None:
    with pytest.raises(UsageError, match=nearest + "$"):
        patch_grid(*size, patch)


def test_wrong_channels_are_refused() -> None:
    embed = PatchEmbed(patch_size=(4, 4), in_chans=3, embed_dim=8)
    with pytest.raises(UsageError, match=r"\[2, 1, 8, 8\]|\(2, 1, 8, 8\).*3 channels"):
        embed.grid(torch.randn(2, 1, 8, 8))


def test_patches_that_do_not_fill_the_grid_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fill a 2x2 grid"):
        unpatchify(torch.zeros(1, 5, 48), (2, 2), (4, 4))
    with pytest.raises(UsageError, match="do not fill"):
        unpatchify(torch.zeros(1, 4, 50), (2, 2), (4, 4))
