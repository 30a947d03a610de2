"""Steps of Muon beside those of torch.optim.Muon, on the matrices inside a model's blocks.

    python benchmarks/muon.py                       # a quarter of a minute; leave the machine alone meanwhile
    python benchmarks/muon.py --device cuda --model mae_vit_base_patch16

Both take the same steps up to rounding, which is looked at first, and PyTorch's computes in bfloat16 alone. They take
turns; the ratio is taken turn by turn.
"""

import torch
from torch import nn

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import quartiles, ratios, time_interleaved, timed
from mae.models.presets import create_model
from mae.training.device import choose_device, computes_in_bf16
from mae.training.muon import Muon
from mae.training.optimizer import make_optimizer

LR, WEIGHT_DECAY = 1e-3, 0.05
BOUND = 0.05
"""Of what a step changes that the two may differ by: bfloat16 through five products."""


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """Copies of the weights that Muon is for, with random gradients."""
    groups = make_optimizer(model, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.95), kind="muon").param_groups
    copies = [nn.Parameter(p.detach().clone()) for group in groups if group["orthogonal"] for p in group["params"]]
    generator = torch.Generator().manual_seed(0)
    for copy in copies:
        copy.grad = torch.randn(copy.shape, generator=generator).to(copy.device)
    return copies


def difference(ours: list[nn.Parameter], theirs: list[nn.Parameter], start: list[nn.Parameter]) -> float:
    """The largest difference of two matrices after a step, relative to the way from their start."""
    with torch.no_grad():
        return max(float((a - b).norm() / (b - c).norm()) for a, b, c in zip(ours, theirs, start, strict=True))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", default="mae_vit_lesson_patch4", help="a name of mae.models.presets")
    parser.add_argument("--seconds", type=float, default=10.0, help="to measure for, about")
    args = parser.parse_args()
    device = choose_device(args.device)
    torch.manual_seed(0)
    model = create_model(args.model).to(device)
    start, ours, theirs = (matrices_of(model) for _ in range(3))
    optimizers = {
        "ours": Muon([{"params": ours, "weight_decay": WEIGHT_DECAY, "orthogonal": True}], betas=(0.9, 0.95)),
        "torch": torch.optim.Muon(
            theirs, lr=LR, weight_decay=WEIGHT_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
    }
    optimizers["ours"].param_groups[0]["lr"] = LR
    for optimizer in optimizers.values():
        optimizer.step()
    away = difference(ours, theirs, start)
    if not away < BOUND:
        raise SystemExit(f"the two differ by {away:.3f} of a step; nothing was timed")
    ways = {name: lambda each=each: timed(each.step, device) for name, each in optimizers.items()}
    seconds = time_interleaved(ways, seconds=args.seconds)
    print(f"{args.model}: {len(ours)} matrices, {device}, {torch.get_num_threads()} thread(s), difference {away:.4f}")
    if not computes_in_bf16(device):
        print("here bfloat16 is emulated, so ours computes in float32")
    for name, measured in seconds.items():
        print(f"{name:5}  {quartiles([1e3 * second for second in measured]).text(1)} ms a step")
    print(f"torch / ours {ratios(seconds['torch'], seconds['ours']).text(2)}")
    write_figures(args.out, {"machine": machine(device), "model": args.model, "seconds": seconds})


if __name__ == "__main__":
    main()
