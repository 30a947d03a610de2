"""Images per second of a training step, ours and transformers' ViTMAE side by side.

    python benchmarks/step.py                     # compact, small and base at 224 px, float32, under four minutes
    python benchmarks/step.py --device cuda --batch-size 256 --out step.json

A step draws the mask, runs forward and backward and takes one AdamW step (fused in both). Both models hold
the same weights, which is checked on the loss of one mask before anything is timed. The two take turns in one
process, so that whatever else the machine does falls on both; medians and quartiles are over the turns, the
ratio is taken turn by turn. The share of peak compares our arithmetic (matrix products counted by
`mae.models.summary`) with a large matrix product measured in the same run.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch
from peer import Peer, make_peer, peer_noise
from torch import Tensor

from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.summary import summarise
from mae.models.zoo import create_model

DEFAULT_MODELS = ("mae_vit_compact_patch16", "mae_vit_small_patch16", "mae_vit_base_patch16")
CPU_BATCH = {"mae_vit_compact_patch16": 32, "mae_vit_small_patch16": 16}
MIN_TURNS, MAX_TURNS = 5, 60


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured of one size; rates in images per second as [lower quartile, median, upper quartile]."""

    model: str
    batch_size: int
    turns: int
    ours: list[float]
    peer: list[float]
    ratio: list[float]
    gflops: float
    share_of_matmul: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT_MODELS), help="names of mae.models.zoo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda runs under bfloat16 autocast")
    parser.add_argument("--batch-size", type=int, help="images per step (default: 32, 16, 8 on a CPU; 128 on a GPU)")
    parser.add_argument("--seconds", type=float, default=40, help="time to spend on each size")
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    return parser.parse_args()


def autocast(device: str) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds that a call takes, the device's queue emptied before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start


def matmul_gflops(device: str) -> float:
    """The best of several large square matrix products, in the type the models compute in."""
    side, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    a @ b
    return 2 * side**3 / min(timed(lambda: a @ b, device) for _ in range(8)) / 1e9


def check_same_loss(ours: MaskedAutoencoder, peer: Peer, images: Tensor) -> None:
    """Refuse to time two models that do not compute the same thing."""
    plan = ours.plan(images)
    with torch.no_grad():
        mine = float(ours(images, plan=plan).loss)
        theirs = float(peer(images, noise=peer_noise(plan)).loss)
    if abs(mine - theirs) > 1e-4 * abs(theirs):
        raise SystemExit(f"the losses differ, nothing was timed: ours {mine}, the peer's {theirs}")


def make_steps(ours: MaskedAutoencoder, peer: Peer, images: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """The training step of each, ours first."""
    device = images.device.type

    def step(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.05, fused=True)

        def run() -> None:
            with autocast(device):
                value = loss()
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    return (
        step(ours, lambda: ours(images, plan=ours.plan(images)).loss),
        step(peer, lambda: peer(images).loss),
    )


def measure(name: str, *, batch_size: int, device: str, seconds: float, peak: float) -> Result:
    torch.manual_seed(0)
    ours = create_model(name).to(device).train()
    peer = make_peer(ours).train()
    assert ours.config is not None
    images = torch.randn(batch_size, ours.config.in_chans, *ours.config.img_size, device=device)
    check_same_loss(ours, peer, images)
    steps = make_steps(ours, peer, images)
    for step in steps * 2:
        step()
    pair = sum(timed(step, device) for step in steps)
    turns = max(MIN_TURNS, min(MAX_TURNS, int(seconds / pair)))
    times: list[list[float]] = [[], []]
    for turn in range(turns):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):  # neither always runs in the other's wake
            times[which].append(timed(steps[which], device))
    rates = [[batch_size / t for t in each] for each in times]
    gflops = summarise(ours).step_flops * median(rates[0]) / 1e9
    return Result(
        model=name,
        batch_size=batch_size,
        turns=turns,
        ours=quantiles(rates[0], n=4),
        peer=quantiles(rates[1], n=4),
        ratio=quantiles([a / b for a, b in zip(*rates, strict=True)], n=4),
        gflops=gflops,
        share_of_matmul=gflops / peak,
    )


def show(results: list[Result]) -> None:
    heads = f"{'model':<26}{'batch':>6}{'turns':>6}{'ours img/s':>25}{'peer img/s':>25}"
    print(f"{heads}{'ours / peer':>22}{'GFLOP/s':>10}{'share':>7}")
    for r in results:
        ours, peer, ratio = (
            f"{mid:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
            for (low, mid, high), digits in ((r.ours, 1), (r.peer, 1), (r.ratio, 2))
        )
        rates = f"{r.model:<26}{r.batch_size:>6}{r.turns:>6}{ours:>25}{peer:>25}"
        print(f"{rates}{ratio:>22}{r.gflops:>10.0f}{r.share_of_matmul:>7.0%}")


def main() -> None:
    args = parse_args()
    peak = matmul_gflops(args.device)
    kind = "float32" if args.device == "cpu" else "bfloat16"
    threads = torch.get_num_threads()
    print(f"{args.device}, {threads} threads, torch {torch.__version__}; {kind} matmul {peak:.0f} GFLOP/s")
    results = []
    for name in args.models:
        batch_size = args.batch_size or (CPU_BATCH.get(name, 8) if args.device == "cpu" else 128)
        results.append(measure(name, batch_size=batch_size, device=args.device, seconds=args.seconds, peak=peak))
    show(results)
    if args.out is not None:
        record = {"device": args.device, "torch": torch.__version__, "threads": threads, "matmul_gflops": peak}
        args.out.write_text(json.dumps({**record, "results": [asdict(r) for r in results]}, indent=2))


if __name__ == "__main__":
    main()
