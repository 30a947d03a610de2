"""A training step of our detector beside torchvision's own with a ResNet-50 and a feature pyramid, without weights.

    OMP_NUM_THREADS=1 python benchmarks/detection_step.py
    OMP_NUM_THREADS=1 python benchmarks/detection_step.py --model mae_vit_small_patch16 --size 512 --out step.json

Both see the same images and objects, forward and backward, in turn; the ratio is taken within each turn. Ours is a
Vision Transformer without windows under a simple feature pyramid and ViTDet's heads, theirs `fasterrcnn_resnet50_fpn`
with images of the same size.
"""

import sys
from argparse import Namespace
from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models.detection import fasterrcnn_resnet50_fpn

from mae.bench.report import machine, markdown_row, script_parser, write_figures
from mae.bench.timing import quartiles, ratios, time_interleaved, timed
from mae.models.detector import DetectionHead, build_detector
from mae.models.presets import create_model

OURS, THEIRS = "ours", "torchvision's ResNet-50 FPN"
CLASSES = tuple(f"class {number}" for number in range(20))


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="mae_vit_small_patch16", help="whose encoder")
    parser.add_argument("--size", type=int, default=512, help="side of the images in pixels")
    parser.add_argument("--batch", type=int, default=1, help="images of a step")
    parser.add_argument("--channels", type=int, default=256, help="of our pyramid and heads; theirs have 256")
    parser.add_argument("--no-rel-pos", action="store_true", help="without relative positions")
    parser.add_argument("--repeats", type=int, default=5, help="how often each is timed, in turn")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def scene(size: int, batch: int, device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Noise with ten objects an image."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, size, size, generator=generator).to(device) for _ in range(batch)]
    targets = []
    for _ in range(batch):
        corner = torch.rand(10, 2, generator=generator) * size / 2
        sides = (0.1 + torch.rand(10, 2, generator=generator)) * size / 3
        boxes = torch.cat([corner, corner + sides], dim=1).to(device)
        targets.append({"boxes": boxes, "labels": torch.randint(1, 21, (10,), generator=generator).to(device)})
    return images, targets


def step(model: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]]) -> None:
    """Forward and backward."""
    model.zero_grad()
    out = model(images, targets)
    loss = sum(out.values()) if isinstance(out, dict) else out.loss
    loss.backward()


def main() -> int:
    args = parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    config = create_model(args.model, mean=(0.5,) * 3, std=(0.25,) * 3).config
    head = DetectionHead(size=args.size, channels=args.channels, rel_pos=not args.no_rel_pos)
    models = {
        OURS: build_detector(config, head, class_names=CLASSES, pretrained=None),
        THEIRS: fasterrcnn_resnet50_fpn(
            weights=None,
            weights_backbone=None,
            num_classes=len(CLASSES) + 1,
            min_size=args.size,
            max_size=args.size,
        ),
    }
    images, targets = scene(args.size, args.batch, device)
    ways = {
        name: partial(timed, partial(step, model.to(device).train(), images, targets), device)
        for name, model in models.items()
    }
    seconds = time_interleaved(ways, turns=args.repeats, warm_ups=1)
    ratio = ratios(seconds[OURS], seconds[THEIRS])
    print("| detector | parameters | seconds a step | ours / theirs |")
    print("|---|---|---|---|")
    for name, model in models.items():
        count = sum(weight.numel() for weight in model.parameters())
        told = ratio.text(2) if name == OURS else ""
        print(markdown_row([name, f"{count / 1e6:.1f} M", quartiles(seconds[name]).text(2), told]))
    write_figures(args.out, {"machine": machine(device), "options": vars(args) | {"out": None}, "seconds": seconds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
