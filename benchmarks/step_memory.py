"""Most bytes that a training step holds at once on a CPU, beside transformers' ViTMAE with the same weights.

    python benchmarks/step_memory.py            # a minute; other work beside it changes nothing
    python benchmarks/step_memory.py --model mae_vit_lesson_patch4 --batch-size 128

Every allocation and release of a step is added up in order, by PyTorch's profiler, and the optimizer's averages are
added; weights and images are not. `mae bench step` shows the process's memory instead, which other things move too.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from mae.bench.peer import make_peer
from mae.bench.report import script_parser
from mae.models.presets import create_model
from mae.training.device import autocast

CPU = torch.device("cpu")


def most_bytes(model: nn.Module, loss: Callable[[], Tensor], precision: str) -> int:
    """Held at once by the second step of AdamW, with the averages that the first one made."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)

    def step() -> None:
        with autocast(precision, CPU):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    averages = (value for state in optimizer.state.values() for value in state.values())
    return most + sum(value.nbytes for value in averages)


def main() -> None:
    """Measure both models in float32 and in bf16."""
    parser = script_parser(__doc__, figures=False)
    parser.add_argument("--model", default="mae_vit_compact_patch16")
    parser.add_argument("--batch-size", type=int, default=32)
    asked = parser.parse_args()
    torch.manual_seed(0)
    ours = create_model(asked.model).train()
    peer = make_peer(ours).train()
    assert ours.config is not None
    images = torch.randn(asked.batch_size, ours.config.layout.channels, *ours.config.layout.size)
    for precision in ("fp32", "bf16"):
        mine = most_bytes(ours, lambda: ours(images, plan=ours.plan(images)).loss, precision)
        theirs = most_bytes(peer, lambda: peer(images).loss, precision)
        print(f"{asked.model}, {precision}: {mine / 1e6:.0f} MB, ViTMAE {theirs / 1e6:.0f}, {mine / theirs:.2f} of it")


if __name__ == "__main__":
    main()
