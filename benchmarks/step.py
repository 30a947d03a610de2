"""Images per second of a training step, ours and transformers' ViTMAE side by side.

    python benchmarks/step.py                     # compact, small and base at 224 px, float32, under four minutes
    python benchmarks/step.py --decoders self cross cross:0.333 --models mae_vit_compact_patch16
    python benchmarks/step.py --device cuda --batch-size 256 --out step.json

A step draws the mask, runs forward and backward and takes one AdamW step (fused in both). Both models hold
the same weights, which is checked on the loss of one mask before anything is timed. All take turns in one
process, so that whatever else the machine does falls on each; medians and quartiles are over the turns, the
ratio is taken turn by turn. Other decoders than the peer's (`cross`, and `cross:SHARE` that predicts a share of
what is hidden) compute something else: their ratio tells what one gains by changing. The share of peak compares
our arithmetic (matrix products counted by `mae.models.summary`) with a large matrix product measured in the
same run.
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
    decoder: str
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
    parser.add_argument("--decoders", nargs="+", default=["self"], help="self, cross, cross:SHARE")
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


def make_step(model: torch.nn.Module, loss: Callable[[], Tensor], device: str) -> Callable[[], None]:
    """A training step."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.05, fused=True)

    def run() -> None:
        with autocast(device):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def step_of(model: MaskedAutoencoder, images: Tensor) -> Callable[[], None]:
    """A training step of ours, under a new mask each time."""

    def loss() -> Tensor:
        assert model.config is not None
        keys = torch.randint(-(2**63), 2**63 - 1, (len(images),), device=images.device)
        return model(images, plan=model.masking.plan(model.config.grid, keys)).loss

    return make_step(model, loss, images.device.type)


def build(name: str, decoder: str, device: str) -> MaskedAutoencoder:
    kind, _, share = decoder.partition(":")
    torch.manual_seed(0)
    return create_model(name, decoder=kind, predict_share=float(share or 1)).to(device).train()


def measure(
    name: str, *, decoders: list[str], batch_size: int, device: str, seconds: float, peak: float
) -> list[Result]:
    plain = build(name, "self", device)
    peer = make_peer(plain).train()
    assert plain.config is not None
    images = torch.randn(batch_size, plain.config.in_chans, *plain.config.img_size, device=device)
    check_same_loss(plain, peer, images)
    models = [build(name, decoder, device) for decoder in decoders]
    steps = [make_step(peer, lambda: peer(images).loss, device), *(step_of(model, images) for model in models)]
    for step in steps * 2:
        step()
    once = sum(timed(step, device) for step in steps)
    turns = max(MIN_TURNS, min(MAX_TURNS, int(seconds / once)))
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(turns):
        for which in range(len(steps)) if turn % 2 == 0 else reversed(range(len(steps))):  # in another's wake each time
            times[which].append(timed(steps[which], device))
    theirs, *rates = [[batch_size / t for t in each] for each in times]
    gflops = [summarise(model).step_flops * median(each) / 1e9 for model, each in zip(models, rates, strict=True)]
    return [
        Result(
            model=name,
            decoder=decoder,
            batch_size=batch_size,
            turns=turns,
            ours=quantiles(ours, n=4),
            peer=quantiles(theirs, n=4),
            ratio=quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4),
            gflops=done,
            share_of_matmul=done / peak,
        )
        for decoder, ours, done in zip(decoders, rates, gflops, strict=True)
    ]


def show(results: list[Result]) -> None:
    heads = f"{'model':<26}{'decoder':<12}{'batch':>6}{'turns':>6}{'ours img/s':>25}{'peer img/s':>25}"
    print(f"{heads}{'ours / peer':>22}{'GFLOP/s':>10}{'share':>7}")
    for r in results:
        ours, peer, ratio = (
            f"{mid:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
            for (low, mid, high), digits in ((r.ours, 1), (r.peer, 1), (r.ratio, 2))
        )
        rates = f"{r.model:<26}{r.decoder:<12}{r.batch_size:>6}{r.turns:>6}{ours:>25}{peer:>25}"
        print(f"{rates}{ratio:>22}{r.gflops:>10.0f}{r.share_of_matmul:>7.0%}")


def main() -> None:
    args = parse_args()
    peak = matmul_gflops(args.device)
    kind = "float32" if args.device == "cpu" else "bfloat16"
    threads = torch.get_num_threads()
    print(f"{args.device}, {threads} threads, torch {torch.__version__}; {kind} matmul {peak:.0f} GFLOP/s")
    results: list[Result] = []
    for name in args.models:
        batch_size = args.batch_size or (CPU_BATCH.get(name, 8) if args.device == "cpu" else 128)
        options = {"decoders": args.decoders, "batch_size": batch_size, "device": args.device, "seconds": args.seconds}
        results += measure(name, **options, peak=peak)
    show(results)
    if args.out is not None:
        record = {"device": args.device, "torch": torch.__version__, "threads": threads, "matmul_gflops": peak}
        args.out.write_text(json.dumps({**record, "results": [asdict(r) for r in results]}, indent=2))


if __name__ == "__main__":
    main()
