"""The detector: its backbone against our encoder, its losses against torchvision's own model, and its traps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import images_for, tiny_config, tiny_model
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign

from mae.errors import MAEError, UsageError
from mae.models.build import build_pretrained_encoder
from mae.models.detection_heads import regions, smallest_anchor
from mae.models.detector import DetectionHead, Detector, build_detector, fitted_size
from mae.models.file import load_with_report, save
from mae.models.fingerprint import output_fingerprint
from mae.training.optimizer import layered_groups

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NAMES = ("disc", "square")


def make(*, masks: bool = True, size: int = 32, window: int = 3, rel_pos: bool = True, **changes: Any) -> Detector:
    torch.manual_seed(0)
    config = tiny_config(mean=MEAN, std=STD, **changes)
    head = DetectionHead(size=size, window=window, rel_pos=rel_pos, channels=8, masks=masks)
    return build_detector(config, head, class_names=NAMES, pretrained=None)


def scene() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two images of different sizes and their objects."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, 32, 20, generator=generator), torch.rand(3, 16, 32, generator=generator)]
    boxes = [torch.tensor([[2.0, 3, 12, 15], [4, 18, 18, 30]]), torch.tensor([[1.0, 1, 20, 12]])]
    labels = [torch.tensor([1, 2]), torch.tensor([2])]
    masks = []
    for image, some in zip(images, boxes, strict=True):
        drawn = torch.zeros(len(some), *image.shape[1:], dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(drawn, some.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        masks.append(drawn)
    parts = zip(boxes, labels, masks, strict=True)
    return images, [{"boxes": b, "labels": names, "masks": m} for b, names, m in parts]


def test_without_windows_the_map_is_the_encoders_own() -> None:
    model = tiny_model(mean=MEAN, std=STD, pos_embed="learned", cls_token=False)
    head = DetectionHead(size=32, window=0, rel_pos=True, channels=8)
    detector = build_detector(model.config, head, class_names=NAMES, pretrained=model)  # type: ignore[arg-type]
    images = images_for(model)
    expected = model.encode(images, layers=[-1], as_map=True).layers[0]
    assert_close(detector.encoder(images), expected)
    assert detector.encoder(torch.randn(1, 3, 20, 12)).shape == (1, 24, 5, 3)  # a shape it was never trained on


def test_sine_cosine_positions_and_class_tokens_of_a_model_are_taken_for_what_they_are() -> None:
    model = tiny_model(mean=MEAN, std=STD)
    detector = build_detector(model.config, DetectionHead(size=16), class_names=NAMES, pretrained=model)  # type: ignore[arg-type]
    assert_close(detector.encoder.pos_embed(model.encoder.grid), model.encoder.pos_embed(model.encoder.grid))
    assert not any("cls_token" in name or name.startswith("encoder.norm") for name, _ in detector.named_parameters())


def test_patches_that_are_not_square_are_refused() -> None:
    """RoI pooling knows one scale of a map: it would look objects up beside where they are."""
    config = tiny_config(mean=MEAN, std=STD, patch_size=(8, 4), img_size=32)
    with pytest.raises(UsageError, match="patches of 8 x 4 pixels; expected square ones"):
        build_detector(config, DetectionHead(size=32), class_names=NAMES, pretrained=None)


def test_another_encoder_is_refused() -> None:
    other = build_pretrained_encoder(tiny_config(embed_dim=12))
    with pytest.raises(UsageError, match="of shape"):
        build_detector(tiny_config(mean=MEAN, std=STD), DetectionHead(size=16), class_names=NAMES, pretrained=other)
    with pytest.raises(UsageError, match="not there"):
        build_detector(
            tiny_config(mean=MEAN, std=STD, depth=3),
            DetectionHead(size=16),
            class_names=NAMES,
            pretrained=build_pretrained_encoder(tiny_config()),
        )


class Whole(nn.Module):
    """A backbone as torchvision wants one."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.parts = nn.Sequential(detector.encoder, detector.pyramid)
        self.out_channels = detector.described.channels

    def forward(self, images: Tensor) -> Any:
        return self.parts(images)


def twin_of(detector: Detector) -> MaskRCNN:
    """torchvision's own model around the same parts, which normalises and fills up by itself."""
    size, rpn, heads = detector.described.size, detector.rpn, detector.roi_heads
    return MaskRCNN(
        Whole(detector),
        min_size=size,
        max_size=size,
        size_divisible=size,
        _skip_resize=True,
        image_mean=list(MEAN),
        image_std=list(STD),
        rpn_anchor_generator=rpn.anchor_generator,
        rpn_head=rpn.head,
        rpn_pre_nms_top_n_train=256,
        rpn_post_nms_top_n_train=256,
        box_batch_size_per_image=64,
        box_roi_pool=heads.box_roi_pool,
        box_head=heads.box_head,
        box_predictor=heads.box_predictor,
        mask_roi_pool=heads.mask_roi_pool,
        mask_head=heads.mask_head,
        mask_predictor=heads.mask_predictor,
    )


def test_losses_and_detections_are_torchvisions() -> None:
    detector, (images, targets) = make(), scene()
    twin = twin_of(detector)
    torch.manual_seed(5)
    expected = twin.train()(images, targets)
    torch.manual_seed(5)
    found = detector.train()(images, targets)
    assert_close(dict(found.terms), expected)
    assert_close(found.loss, torch.stack(list(expected.values())).sum())
    with torch.no_grad():
        square = [torch.rand(3, 32, 32), torch.rand(3, 32, 24)]
        ours, theirs = detector.eval().detect(square), twin.eval()(square)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one.boxes, other["boxes"])
        assert_close(one.labels, other["labels"] - 1)
        assert one.masks is not None
        assert_close(one.masks, other["masks"][:, 0] >= 0.5)


def test_images_are_normalised_once_and_filled_up_with_the_mean_to_a_square() -> None:
    detector, (images, targets) = make(masks=False), scene()
    seen: list[Tensor] = []
    detector.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    detector.train()(images, targets)
    assert seen[0].shape == (2, 3, 32, 32)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    assert_close(seen[0][0, :, :, :20], (images[0] - mean) / std)
    assert not seen[0][0, :, :, 20:].any()


def test_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 32"):
        make().eval()([torch.rand(3, 33, 8)])


def test_labels_begin_at_1_and_0_is_the_background() -> None:
    """A head that is sure of the last class gives its name, not that of the class before or after."""
    detector, (images, _) = make(masks=False), scene()
    assert detector.roi_heads.box_predictor.cls_score.out_features == 3
    detector.eval()
    predictor = detector.roi_heads.box_predictor
    nn.init.zeros_(predictor.cls_score.weight)
    predictor.cls_score.bias.data = torch.tensor([0.0, 0.0, 9.0])
    found = detector.predict([(image * 255).byte() for image in images])
    assert all(set(each.classes) == {"square"} and set(each.labels.tolist()) == {1} for each in found)


def test_scales_of_pooling_do_not_hang_on_the_first_batch() -> None:
    """torchvision guesses them from the first images, before these are filled up."""
    image = torch.rand(3, 8, 8)
    for detector in (make(), make(patch_size=(8, 8), size=64)):
        patch = detector.config.layout.patch[0]  # type: ignore[union-attr]
        pooling = detector.roi_heads.box_roi_pool
        detector.eval()([image])
        assert pooling.scales == [4 / patch, 2 / patch, 1 / patch, 0.5 / patch]
    guessing = MultiScaleRoIAlign(["0", "1", "2", "3"], output_size=7, sampling_ratio=2)
    batch = ImageList(torch.zeros(1, 3, 64, 64), [(8, 8)])
    maps = detector.pyramid(detector.encoder(batch.tensors))
    guessing(maps, [torch.tensor([[0.0, 0, 8, 8]])], batch.image_sizes)
    assert guessing.scales != pooling.scales


def test_the_published_anchors_and_levels() -> None:
    assert [smallest_anchor(size, 16) for size in (1024, 512, 256)] == [32, 32, 16]
    assert [regions(size) for size in (1024, 512, 256, 32)] == [512, 512, 256, 64]
    config = tiny_config(mean=MEAN, std=STD, img_size=(64, 64), patch_size=(16, 16))
    detector = build_detector(config, DetectionHead(size=512, channels=8), class_names=NAMES, pretrained=None)
    assert detector.rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))
    levels = detector.roi_heads.box_roi_pool.map_levels
    sides = torch.tensor([32.0, 111, 112, 223, 224, 447, 448, 900])
    boxes = torch.stack([sides * 0, sides * 0, sides, sides], dim=1)
    assert levels([boxes]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("patch", "size"), [(4, 32), (14, 70), (6, 48), (2, 16), (16, 112)])
def test_anchors_lie_where_their_places_do(patch: int, size: int) -> None:
    detector = make(patch_size=(patch, patch), img_size=(4 * patch, 4 * patch), size=size, masks=False)
    maps = list(detector.pyramid(detector.encoder(torch.zeros(1, 3, size, size))).values())
    (anchors,) = detector.rpn.anchor_generator(ImageList(torch.zeros(1, 3, size, size), [(size, size)]), maps)
    centres = [
        (column * stride, row * stride)
        for found, stride in zip(maps, [patch * times for times in (0.25, 0.5, 1, 2, 4)], strict=True)
        for row in range(found.shape[2])
        for column in range(found.shape[3])
        for _ in range(3)  # shapes
    ]
    assert_close((anchors[:, :2] + anchors[:, 2:]) / 2, torch.tensor(centres, dtype=torch.float32))
    if patch == 4:  # torchvision's strides are right
        of_torchvision = AnchorGenerator(detector.rpn.anchor_generator.sizes, ((0.5, 1.0, 2.0),) * 5)
        (expected,) = of_torchvision(ImageList(torch.zeros(1, 3, size, size), [(size, size)]), maps)
        assert_close(anchors, expected)


@pytest.mark.parametrize(("depth", "decay"), [(12, 0.7), (24, 0.8)])
def test_rates_by_parameter_for_base_and_large(depth: int, decay: float) -> None:
    detector = make(depth=depth, window=2)
    groups = layered_groups(
        detector,
        layer_of=detector.layer_of,
        num_layers=detector.num_layers,
        decay=decay,
        weight_decay=0.1,
        undecayed=detector.undecayed,
    )
    found = {name: (group["lr_scale"], group["weight_decay"]) for group in groups for name, _ in group["params"]}
    assert found.keys() == {name for name, _ in detector.named_parameters()}
    assert found["encoder.pos_embed.table"] == (pytest.approx(decay ** (depth + 1)), 0.0)
    assert found["encoder.patch_embed.proj.weight"] == (pytest.approx(decay ** (depth + 1)), 0.1)
    for block in range(depth):
        scale = pytest.approx(decay ** (depth - block))
        assert found[f"encoder.blocks.{block}.attn.qkv.weight"] == (scale, 0.1)
        assert found[f"encoder.blocks.{block}.attn.rel_pos.rows"] == (scale, 0.1)
        assert found[f"encoder.blocks.{block}.norm1.weight"] == (scale, 0.0)
    above = {name: of for name, of in found.items() if not name.startswith("encoder.")}
    assert {scale for scale, _ in above.values()} == {1.0}
    windows = [block.attn.window for block in detector.encoder.blocks]
    whole = [number for number, side in enumerate(windows) if not side]
    assert whole == {12: [2, 5, 8, 11], 24: [5, 11, 17, 23]}[depth]


@pytest.mark.parametrize("masks", [True, False])
def test_a_file_holds_all_of_it_and_tells_changed_weights(masks: bool, tmp_path: Path) -> None:
    detector = make(masks=masks)
    with torch.no_grad():  # else the pyramid's last weights, all of one sign, would do
        for weight in detector.parameters():
            weight += torch.randn_like(weight) * 0.05
    save(detector, tmp_path / "detector.safetensors")
    loaded, report = load_with_report(tmp_path / "detector.safetensors")
    assert isinstance(loaded, Detector) and loaded.class_names == NAMES and loaded.described == detector.described
    assert report.probe is not None
    image = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    ours, theirs = detector.predict(image, threshold=0.0)[0], loaded.predict(image, threshold=0.0)[0]
    assert_close(ours.boxes, theirs.boxes, rtol=0, atol=0)
    assert ours.boxes[:, 2].max() <= 60 and ours.boxes[:, 3].max() <= 40 and ours.boxes[:, 2].max() > 32
    for name, weight in detector.named_parameters():
        if name.endswith("weight") and (name.startswith(("pyramid", "rpn", "roi_heads")) or ".0." in name):
            with torch.no_grad():
                weight.flatten()[0] += 0.5
                first, second = output_fingerprint(detector), output_fingerprint(loaded)
                assert first is not None and second is not None
                assert first.difference(second) > 1e-6, name
                weight.flatten()[0] -= 0.5


def test_what_is_less_sure_than_average_precision_counts_is_found_where_it_is_asked_for() -> None:
    torch.manual_seed(0)
    names = tuple(f"class {number}" for number in range(40))  # of which an untrained model is equally sure
    head = DetectionHead(size=32, window=0, channels=8)
    detector = build_detector(tiny_config(mean=MEAN, std=STD), head, class_names=names, pretrained=None).eval()
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    unsure = detector.predict(image, threshold=0.01)[0].scores
    assert len(unsure) and 0.01 <= unsure.min() < unsure.max() < 0.05
    assert not len(detector.detect([torch.rand(3, 32, 32)])[0].scores), "as evaluations have it"
    assert not len(detector([torch.rand(3, 32, 32)])[0]["scores"])


@pytest.mark.parametrize(("dtype", "pixels"), [(torch.float16, 0.1), (torch.bfloat16, 0.5)])
def test_a_detector_in_half_precision_finds_what_it_does_in_float32(dtype: torch.dtype, pixels: float) -> None:
    image = np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8)
    detector = make(size=128, patch_size=16, img_size=32).eval()
    expected = detector.predict(image, threshold=0.0)[0]
    found = detector.to(dtype).predict(image, threshold=0.0)[0]
    assert len(found.boxes) == len(expected.boxes) > 0
    assert found.masks is not None and found.masks.shape[1:] == (128, 128)
    # Of an untrained model the scores say little of the order; each box must lie where one of float32 does.
    nearest = (found.boxes[:, None] - expected.boxes).abs().amax(dim=-1).amin(dim=1)
    assert nearest.median() < pixels


def test_values_that_are_not_finite_are_refused() -> None:
    image = np.full((20, 30, 3), 0.5, dtype=np.float32)
    image[3, 4, 1] = np.nan
    with pytest.raises(UsageError, match="image 1 holds values that are not finite"):
        make().predict(image)


def test_images_of_any_shape_fit() -> None:
    assert fitted_size((480, 640), 512) == (384, 512)
    assert fitted_size((1, 1000), 64) == (1, 64)


def test_what_a_detector_cannot_be() -> None:
    for size in (3, 30):  # less than a patch, and more than some
        with pytest.raises(UsageError, match="multiple of the patch"):
            make(size=size)
    with pytest.raises(UsageError, match="0 classes"):
        build_detector(tiny_config(mean=MEAN, std=STD), DetectionHead(size=16), class_names=(), pretrained=None)
    with pytest.raises(UsageError, match="window"):
        DetectionHead(size=16, window=-1)
    with pytest.raises(UsageError, match="channel statistics"):
        build_detector(tiny_config(), DetectionHead(size=16), class_names=NAMES, pretrained=None)


def test_a_file_without_a_described_head_is_refused(tmp_path: Path) -> None:
    save(make(), tmp_path / "detector.safetensors")
    content = (tmp_path / "detector.safetensors").read_bytes()
    (tmp_path / "detector.safetensors").write_bytes(content.replace(b'\\"objects\\"', b'\\"objectz\\"'))
    with pytest.raises(MAEError, match="objects"):
        load_with_report(tmp_path / "detector.safetensors")
