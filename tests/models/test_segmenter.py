"""Segmenters: windows against a slow loop, heads, files, layers of parameters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import run_script
from tiny import images_for, tiny_config, tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate
from torch.testing import assert_close

import mae
from mae.errors import MAEError, UsageError
from mae.models.file import load_with_report
from mae.models.kinds import Classes, kind_of
from mae.models.preprocess import Preprocessing
from mae.models.segmenter import MapHead, Segmenter, build_segmenter, linear_head, upernet_head
from mae.models.sliding import covering, likeliest, map_of_classes, sliding_probabilities, starts

STATISTICS: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.25)}


def segmenter(head: MapHead | None = None, *, pretrained: bool = True, **changes: Any) -> Segmenter:
    """One whose norms have seen some images."""
    config = tiny_config(**STATISTICS, **changes)
    source = tiny_model(**STATISTICS, **changes) if pretrained else None
    torch.manual_seed(3)
    depth = config.encoder.depth
    made = build_segmenter(
        config,
        head=head or upernet_head(depth, 6),
        num_classes=3,
        class_names=("road", "sky", "tree"),
        drop_path=0.0,
        pretrained=source,
    )
    model = tiny_model(**STATISTICS, **changes)
    for seed in range(3):
        made.train()(images_for(model, seed=seed))
    return made.eval()


LENGTHS = [(24, 24), (25, 24), (40, 24), (41, 24), (57, 24), (7, 7), (9, 1), (512, 341)]


@pytest.mark.parametrize(("length", "window"), LENGTHS)
def test_windows_cover_a_length_two_thirds_of_one_apart(length: int, window: int):
    found = starts(length, window)
    stride = max(1, 2 * window // 3)
    count = max(length - window + stride - 1, 0) // stride + 1  # as mmsegmentation counts them
    assert len(found) == count and found[0] == 0 and found[-1] == length - window
    assert all(second - first <= stride for first, second in zip(found, found[1:], strict=False))


@pytest.mark.parametrize("size", [(16, 24), (16, 61), (37, 24), (40, 55)])
def test_windows_are_averaged_as_a_slow_loop_averages_them(size: tuple[int, int]):
    image = torch.randn(3, *size, generator=torch.Generator().manual_seed(0))

    def logits(cut: Tensor) -> Tensor:  # depends on the place in the window, so that a wrong corner shows
        rows = torch.arange(16.0)[:, None].expand(16, 24)
        return torch.stack([cut[:, 0], cut[:, 1] * rows / 8, cut.sum(dim=1)], dim=1)

    found = sliding_probabilities(image, (16, 24), logits)
    total, count = torch.zeros(3, *size), torch.zeros(size)
    for top in starts(size[0], 16):
        for left in starts(size[1], 24):
            shares = logits(image[None, :, top : top + 16, left : left + 24]).softmax(dim=1)[0]
            for row in range(16):
                for column in range(24):
                    total[:, top + row, left + column] += shares[:, row, column]
                    count[top + row, left + column] += 1
    assert_close(found, total / count)
    assert_close(found.sum(dim=0), torch.ones(size))


@pytest.mark.parametrize("several", [1, 2, 7])
def test_the_likeliest_class_is_that_of_all_resized_together(several: int, monkeypatch: pytest.MonkeyPatch):
    shares = torch.randn(7, 9, 5, generator=torch.Generator().manual_seed(0)).softmax(dim=0)
    monkeypatch.setattr("mae.models.sliding._VALUES", several * 21 * 34)
    expected = interpolate(shares[None], (21, 34), mode="bilinear")[0].argmax(dim=0)
    assert torch.equal(likeliest(shares, (21, 34)), expected.to(torch.uint8))


@pytest.mark.parametrize(("size", "expected"), [((8, 12), (16, 24)), ((3, 30), (16, 160)), ((100, 24), (100, 24))])
def test_an_image_is_resized_until_it_covers_the_window(size: tuple[int, int], expected: tuple[int, int]):
    assert covering(size, (16, 24)) == expected


def test_an_image_too_lengthy_is_refused():
    wanted = Preprocessing(img_size=(16, 24))
    with pytest.raises(MAEError, match="at most 64 times as long as wide"):
        map_of_classes(torch.zeros(3, 2, 200), wanted, lambda cut: cut, device=torch.device("cpu"))


@pytest.mark.parametrize("size", [(16, 24), (5, 7), (50, 31), (1, 1)])
def test_maps_come_in_the_pixels_of_the_images(size: tuple[int, int]):
    model = segmenter()
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8), rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)]
    first, second = model.predict(images)
    assert first.shape == size and second.shape == (20, 20) and first.dtype == torch.uint8
    assert int(first.max()) < 3 and not model.training
    if size == (16, 24):  # one window: what the model says itself
        pixels = torch.from_numpy(images[0]).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(STATISTICS[name])[:, None, None] for name in ("mean", "std"))
        with torch.no_grad():
            assert torch.equal(first.long(), model(((pixels - mean) / std)[None]).argmax(dim=1)[0])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_no_class_but_refused(value: float):
    image = np.full((20, 30, 3), 0.5, dtype=np.float32)
    image[3, 4, 1] = value
    with pytest.raises(UsageError, match="image 1 holds values that are not finite"):
        segmenter().predict(image)
    assert segmenter(nodata="nan").predict(np.full((20, 30, 3), np.nan, dtype=np.float32))[0].shape == (20, 30)


@pytest.mark.parametrize("head", [linear_head(2), linear_head(2, 2), upernet_head(2, 6)])
def test_a_file_holds_head_and_names(head: MapHead, tmp_path: Path):
    model = segmenter(head)
    mae.save(model, tmp_path / "s.safetensors")
    loaded, report = load_with_report(tmp_path / "s.safetensors")
    assert isinstance(loaded, Segmenter) and kind_of(loaded) == "segmenter" and loaded.described == head
    assert loaded.class_names == ("road", "sky", "tree") and report.classes == 3 and report.probe is not None
    images = images_for(tiny_model())
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    assert isinstance(mae.load(tmp_path / "s.safetensors"), Segmenter)


def test_a_changed_head_does_not_reproduce_the_probe(tmp_path: Path):
    model = segmenter()
    header = mae.models.file.model_metadata(model, probe=mae.models.fingerprint.output_fingerprint(model))
    assert isinstance(model.head.pool[0].norm.running_var, Tensor)
    model.head.pool[0].norm.running_var += 0.5
    mae.models.file.save_model(model, tmp_path / "s.safetensors", header)
    with pytest.raises(MAEError, match="does not reproduce the probe"):
        load_with_report(tmp_path / "s.safetensors")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kind": "upernet", "layers": (0,), "channels": 4}, "expected 4 for upernet"),
        ({"kind": "linear", "layers": ()}, "else 1 or more"),
        ({"kind": "upernet", "layers": (0, 0, 0, 1), "channels": 0}, "channels is 0"),
        ({"kind": "linear", "layers": (2,)}, "this encoder has blocks 0 to 1"),
    ],
)
def test_heads_that_cannot_be_are_refused(options: dict[str, Any], told: str):
    with pytest.raises(UsageError, match=told):
        segmenter(MapHead(**options))


def test_a_file_without_a_described_head_is_refused():
    with pytest.raises(UsageError, match="head of a segmenter is not described"):
        mae.models.kinds.build("segmenter", tiny_config(), Classes(count=2))


def test_upernet_reads_the_blocks_of_the_published_recipe():
    assert [upernet_head(depth, 8).layers for depth in (12, 24)] == [(3, 5, 7, 11), (7, 11, 15, 23)]
    assert upernet_head(1, 8).layers == (0, 0, 0, 0)


def test_positions_and_weights_are_those_of_the_pretrained_encoder():
    source, model = tiny_model(**STATISTICS), segmenter(linear_head(2))
    images = images_for(source)
    with torch.no_grad():
        assert_close(model.encode(images).patches, source.encode(images).patches)
    assert model.config is not None and model.config.encoder.pos_embed == "learned"


def test_each_parameter_has_the_layer_of_its_block():
    found = segmenter(linear_head(2))
    layers = {name: found.layer_of(name) for name, _ in found.named_parameters()}
    assert layers["encoder.patch_embed.proj.weight"] == layers["encoder.pos_embed.table"] == 0
    assert layers["encoder.blocks.0.mlp.fc1.weight"] == 1 and layers["encoder.blocks.1.norm1.weight"] == 2
    assert layers["encoder.norm.weight"] == layers["head.classes.weight"] == 3


def test_the_loss_is_the_mean_over_pixels_that_count():
    model = segmenter(linear_head(2)).train()
    images, target = images_for(tiny_model()), torch.randint(3, (3, 16, 24))
    target[0, :5] = 255
    torch.manual_seed(0)
    output = model(images, target)
    kept = target != 255
    expected = cross_entropy(output.logits.permute(0, 2, 3, 1)[kept], target[kept])
    assert_close(output.loss, expected)
    assert float(model(images, torch.full_like(target, 255)).loss) == 0
    output.loss.backward()
    unused = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not unused  # of which DistributedDataParallel would complain


def test_upernet_leaves_no_parameter_unused():
    model = segmenter(upernet_head(2, 6)).train()
    model(images_for(tiny_model()), torch.randint(3, (3, 16, 24))).loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.grad is None]


@pytest.mark.slow
def test_several_processes_have_loss_gradient_and_statistics_of_one(tmp_path: Path):
    run_script(Path(__file__).with_name("segmenter_together.py"), tmp_path, seconds=200)
    one = torch.load(tmp_path / "1-0.pt")
    for size, rank in [(2, 0), (2, 1), (3, 0), (3, 2)]:
        found = torch.load(tmp_path / f"{size}-{rank}.pt")
        assert_close(found["loss"], one["loss"], rtol=1e-5, atol=1e-6)
        assert_close(found["statistics"], one["statistics"], rtol=1e-4, atol=1e-6)
        assert_close(found["gradient"], one["gradient"], rtol=2e-3, atol=2e-5)
