"""Features of one image at a time on a GPU: milliseconds of a forward pass, plain and as a CUDA graph, beside timm's.

    python benchmarks/latency.py                                 # half a minute; leave the machine alone meanwhile
    python benchmarks/latency.py --device cpu --batch-size 1     # there are no graphs on a CPU

The whole encoder on whole images, its weights in bfloat16, without gradients. A kernel of one image takes less time
than Python takes to ask for it; a CUDA graph asks for all of them at once. Every way is compared with the same pass in
float32 before anything is timed; each turn measures all of them.
"""

from collections.abc import Callable
from typing import Any

import timm
import torch
from rich.console import Console
from torch import Tensor

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import quartiles, ratios, time_interleaved, timed
from mae.models.presets import create_model
from mae.report.terminal.tables import show_grid
from mae.training.device import choose_device

CALLS = 20
"""In a turn, one after the other: each is waited for, as a server would."""
BOUND = 0.05
"""Of the features' norm that bfloat16 may be away from float32."""


def as_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of what `run` asks of the device, on the very tensors that it took; it gives what the capture gave."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries ask for their memory before the capture
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()

    def replay() -> Any:
        graph.replay()
        return found

    return replay


def check(way: str, found: Tensor, exact: Tensor) -> None:
    """Stop where a way computes something else."""
    away = float((found.float() - exact).norm() / exact.norm())
    if not away < BOUND:
        raise SystemExit(f"{way} is {away:.3f} of the norm away from float32; nothing was timed")


def show_ways(title: str, seconds: dict[str, list[float]], *, beside: str) -> None:
    """Milliseconds of each way, and how many times as fast it is as one of them."""
    rows = [
        (way, quartiles([1e3 * value for value in values]).text(2), ratios(seconds[beside], values).text(2))
        for way, values in seconds.items()
    ]
    show_grid(Console(width=100), title, ["way", "ms", "times as fast"], rows)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--model", default="mae_vit_base_patch16")
    parser.add_argument("--peer", default="vit_base_patch16_224", help="timm's name for the same architecture")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    device = choose_device(args.device)
    torch.manual_seed(0)
    ours = create_model(args.model).encoder.to(device).eval()
    theirs = timm.create_model(args.peer, num_classes=0).to(device).eval()
    images = torch.randn(args.batch_size, 3, 224, 224, device=device)
    passes: dict[str, Callable[[Tensor], Tensor]] = {"ours": lambda x: ours(x).tokens, "timm": theirs.forward_features}
    ways: dict[str, Callable[[], float]] = {}
    with torch.no_grad():
        exact = {name: run(images) for name, run in passes.items()}
        half = images.bfloat16()
        for model in (ours, theirs):
            model.bfloat16()
        for name, run in passes.items():
            forms = {name: lambda run=run: run(half)}
            if device.type == "cuda":
                forms[f"{name}, CUDA graph"] = as_graph(lambda run=run: run(half))
            for way, call in forms.items():
                check(way, call(), exact[name])
                ways[way] = lambda call=call: sum(timed(call, device) for _ in range(CALLS)) / CALLS
        seconds = time_interleaved(ways, seconds=args.seconds)
    show_ways(f"{args.model}, batch of {args.batch_size}", seconds, beside="timm")
    write_figures(args.out, {"machine": machine(device), "model": args.model, "seconds": seconds})


if __name__ == "__main__":
    main()
