"""A detector as a graph that runs without this package: from the pixels of an image to its objects."""

from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import pad
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import concat_box_prediction_layers
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, nms, roi_align

from mae.interop.exports.graphs import write_onnx
from mae.models.detector import Detector

_SMALLEST = 1e-2
"""Pixels: a found box with a shorter side is left out, as in torchvision."""


class DetectionGraph(nn.Module):
    """What `Detector` finds in one image, by torchvision's own layers and in steps that a graph can hold.

    torchvision's own steps branch on how many boxes there are, which no graph can.

    Args:
        model: in evaluation mode; used, not copied.
    """

    anchors: Tensor

    def __init__(self, model: Detector) -> None:
        super().__init__()
        self.model = model
        self.size = model.described.size
        with torch.no_grad():
            square = torch.zeros(1, len(model.transform.image_mean), self.size, self.size)
            maps = list(model.pyramid(model.encoder(square)).values())
            (anchors,) = model.rpn.anchor_generator(ImageList(square, [(self.size, self.size)]), maps)
        self.register_buffer("anchors", anchors, persistent=False)
        self.train(model.training)

    def forward(self, image: Float[Tensor, "C H W"], threshold: Float[Tensor, ""]) -> dict[str, Tensor]:
        """`boxes [n, 4]` in pixels of the image, `labels [n]` from 0, `scores [n]`, the surest first.

        Where the model tells masks, also `masks [n, 28, 28]`: how sure it is of each spot of the box, in [0, 1].

        Args:
            image: as `Detector.forward` takes it: not normalised, no side above the model's size.
            threshold: what is found with this score or less is left out.
        """
        model, (height, width) = self.model, image.shape[1:]
        filled = pad(model.transform.normalize(image), (0, self.size - width, 0, self.size - height))
        maps = model.pyramid(model.encoder(filled[None]))
        proposals = self._proposals(maps, (height, width))
        heads = model.roi_heads
        logits, offsets = heads.box_predictor(heads.box_head(_pooled(heads.box_roi_pool, maps, proposals)))
        boxes = heads.box_coder.decode_single(offsets, proposals).unflatten(1, (-1, 4))[:, 1:].reshape(-1, 4)
        boxes = clip_boxes_to_image(boxes, (height, width))
        scores = logits.softmax(dim=1)[:, 1:]
        labels = torch.arange(scores.shape[1]).expand_as(scores).flatten()
        scores = scores.flatten()
        kept = self._unlike(boxes, scores, labels, (scores > threshold) & _large(boxes, _SMALLEST), heads.nms_thresh)
        kept = kept[: heads.detections_per_img]
        found = {"boxes": boxes[kept], "labels": labels[kept], "scores": scores[kept]}
        if model.described.masks:
            found["masks"] = self._masks(maps, found["boxes"], found["labels"])
        return found

    def _proposals(self, maps: dict[str, Tensor], shape: tuple[int, int]) -> Float[Tensor, "p 4"]:
        """Where something may be, whatever it is."""
        rpn = self.model.rpn
        of_levels, offsets = rpn.head(list(maps.values()))
        counts = [level[0].numel() for level in of_levels]
        logits, flat_offsets = concat_box_prediction_layers(of_levels, offsets)
        boxes = rpn.box_coder.decode_single(flat_offsets, self.anchors)
        best = rpn._get_top_n_idx(logits.view(1, -1), counts)[0]
        levels = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
        boxes = clip_boxes_to_image(boxes[best], shape)
        kept = self._unlike(
            boxes, logits.flatten()[best].sigmoid(), levels[best], _large(boxes, rpn.min_size), rpn.nms_thresh
        )
        return boxes[kept[: rpn.post_nms_top_n()]]

    def _unlike(
        self,
        boxes: Float[Tensor, "n 4"],
        scores: Float[Tensor, " n"],
        groups: Int64[Tensor, " n"],
        wanted: Bool[Tensor, " n"],
        overlap: float,
    ) -> Int64[Tensor, " m"]:
        """Which of the wanted boxes are left when none of a group overlaps a surer one by more; the surest first."""
        numbers = torch.where(wanted)[0]
        # Each group is moved to a square of its own, where it meets no other.
        moved = boxes[numbers] + (groups[numbers].to(boxes) * (self.size + 1))[:, None]
        return numbers[nms(moved, scores[numbers], overlap)]

    def _masks(
        self, maps: dict[str, Tensor], boxes: Float[Tensor, "n 4"], labels: Int64[Tensor, " n"]
    ) -> Float[Tensor, "n h w"]:
        heads = self.model.roi_heads
        logits = heads.mask_predictor(heads.mask_head(_pooled(heads.mask_roi_pool, maps, boxes)))
        # The first of the predictor's classes is none.
        of_class = (labels + 1)[:, None, None, None].expand(-1, 1, *logits.shape[2:])
        return logits.gather(1, of_class)[:, 0].sigmoid()


def write_detector(model: Detector, path: Path, facts: Mapping[str, str]) -> None:
    """Write the graph as an ONNX file for one image of any shape that fits the model's square; see `write_onnx`."""
    graph = DetectionGraph(model)
    example = {
        "image": torch.zeros(len(model.transform.image_mean), graph.size, graph.size - 1),
        "threshold": torch.tensor(0.5),
    }
    sides = {axis: torch.export.Dim(name, min=1, max=graph.size) for axis, name in ((1, "height"), (2, "width"))}
    with torch.no_grad():  # with gradients attention is taken apart in an order that cannot be viewed as a map
        write_onnx(graph, example, path, facts, shapes={"image": sides, "threshold": None})


def _large(boxes: Float[Tensor, "n 4"], side: float) -> Bool[Tensor, " n"]:
    return (boxes[:, 2:] - boxes[:, :2] >= side).all(dim=1)


def _pooled(
    pooling: MultiScaleRoIAlign, maps: dict[str, Tensor], boxes: Float[Tensor, "n 4"]
) -> Float[Tensor, "n D h w"]:
    """What the pooling gives for boxes of one image: each is read on every level, and that of its size is kept."""
    levels = pooling.map_levels([boxes])
    regions = pad(boxes, (1, 0))  # the number of the image, which is 0
    chosen: Tensor | None = None
    for number, (name, scale) in enumerate(zip(pooling.featmap_names, pooling.scales, strict=True)):
        read = roi_align(maps[name], regions, pooling.output_size, scale, pooling.sampling_ratio)
        chosen = read if chosen is None else torch.where((levels == number)[:, None, None, None], read, chosen)
    assert chosen is not None
    return chosen
