"""A whole training step as one CUDA graph, beside the same step asked for kernel by kernel: what the asking costs.

    python benchmarks/step_graph.py                      # 32 pixels; a minute, leave the machine alone meanwhile
    python benchmarks/step_graph.py --model mae_vit_tiny_patch16 --batch-size 256
    python benchmarks/step_graph.py --device cpu         # to try the script: there are no graphs on a CPU

Forward under a new mask each time, backward and AdamW, in bf16, on the same images. Runs do not train by graphs: a
learning rate that changes, a mask of another length or a second process would each have to be made for them.
"""

import torch
from latency import as_graph, show_ways

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.step import OwnStep
from mae.bench.timing import time_interleaved, timed
from mae.layers.compiled import compiling, failing_aloud
from mae.models.presets import create_model
from mae.training.device import choose_device

STEPS = 5
"""In a turn, asked for one after the other."""


def capturable(step: OwnStep) -> OwnStep:
    """Its optimizer counts and takes its rate on the device, as a graph must."""
    for group in step.optimizer.param_groups:
        group.update(capturable=True, lr=torch.tensor(group["lr"], device=step.device))
    for state in step.optimizer.state.values():
        state["step"] = state["step"].to(step.device)
    return step


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--model", default="mae_vit_lesson_patch4")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    device = choose_device(args.device)
    ways = {}
    with compiling(None), failing_aloud():
        for way, compiled in {"as it is": False, "compiled": True}.items():
            forms = [way, f"{way}, CUDA graph"] if device.type == "cuda" else [way]
            for form in forms:
                torch.manual_seed(0)
                step = OwnStep(create_model(args.model), "adamw", args.batch_size, device, "bf16", compiled)
                step.warm_up()
                run = as_graph(capturable(step).run) if form != way else step.run
                ways[form] = lambda run=run: timed(lambda: [run() for _ in range(STEPS)], device) / STEPS
        seconds = time_interleaved(ways, seconds=args.seconds)
    show_ways(f"A step of {args.model}, batch of {args.batch_size}", seconds, beside="as it is")
    write_figures(args.out, {"machine": machine(device), "model": args.model, "seconds": seconds})


if __name__ == "__main__":
    main()
