"""Does the number of tokens suit the hardware? 49 and 50, as 75 % of 196 leave them, beside 48, 56 and 64.

    python benchmarks/tokens.py                                              # two minutes; leave the machine alone
    python benchmarks/tokens.py --device cuda --model mae_vit_large_patch16 --batch-size 256

Forward and backward through the encoder's blocks, turn by turn: time of a token over that of one of 64. Where it is 1
a number that is no multiple of 8 or 16 costs nothing but its own tokens; were it above 64/49 = 1.31 for 49, filling the
sequence up to 64 would be faster.
"""

import torch
from rich.console import Console

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import quartiles, ratios, time_interleaved, timed
from mae.encoders.vit import MAEEncoder
from mae.models.presets import create_model
from mae.report.terminal.tables import show_grid
from mae.training.device import autocast, choose_device, choose_precision, keep_freed_memory

TOKENS = (48, 49, 50, 56, 64)


def through(encoder: MAEEncoder, tokens: torch.Tensor, precision: str) -> None:
    with autocast(precision, tokens.device):
        found = encoder.blocks(tokens)
    found.float().square().mean().backward()
    encoder.zero_grad(set_to_none=True)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--model", default="mae_vit_compact_patch16")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    device = choose_device(args.device)
    precision = choose_precision(args.precision, device)
    if device.type == "cpu":
        keep_freed_memory()
    encoder = create_model(args.model).encoder.to(device)
    ways = {}
    for count in TOKENS:
        tokens = torch.randn(args.batch_size, count, encoder.embed_dim, device=device, requires_grad=True)
        ways[str(count)] = lambda tokens=tokens: timed(lambda: through(encoder, tokens, precision), device)
    seconds = time_interleaved(ways, seconds=args.seconds)
    a_token = {name: [value / int(name) for value in values] for name, values in seconds.items()}
    beside = {name: ratios(values, a_token["64"]) for name, values in a_token.items()}
    title = f"{args.model}, batches of {args.batch_size}, {device}, {precision}"
    rows = [
        (name, quartiles([1e3 * value for value in seconds[name]]).text(1), beside[name].text(3)) for name in seconds
    ]
    show_grid(Console(width=120), title, ["tokens", "milliseconds", "a token, beside one of 64"], rows)
    medians = {name: each.median for name, each in beside.items()}
    about = {**machine(device), "precision": precision}
    write_figures(args.out, {"machine": about, "model": args.model, "seconds": seconds, "a_token": medians})


if __name__ == "__main__":
    main()
