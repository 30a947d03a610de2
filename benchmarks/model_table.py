"""Writes the table of model sizes into docs/method/models.md; counted, nothing typed by hand.

python benchmarks/model_table.py            # rewrites the table
python benchmarks/model_table.py --check    # exits with 1 if the table is out of date
"""

import argparse
from pathlib import Path

from mae.models.presets import ALIASES, list_models, model_config
from mae.models.summary import summarise

PAGE = Path(__file__).parents[1] / "docs" / "method" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEADER = """\
| name (short name) | image, patch | encoder | decoder | parameters: encoder + decoder = total | \
FLOPs an image: encoder | decoder | training step | `encode` |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def table() -> str:
    """The table in Markdown, a row a size."""
    return HEADER + "".join(row(name) for name in list_models())


def row(name: str) -> str:
    config = model_config(name)
    encoder, decoder, cost = config.encoder, config.decoder, summarise(config)
    short = ", ".join(f"`{alias}`" for alias, target in ALIASES.items() if target == name)
    cells = (
        f"`{name}`" + (f" ({short})" if short else ""),
        f"{config.layout.size[0]} px, {config.layout.patch[0]} px",
        f"{encoder.embed_dim} wide, {encoder.depth} blocks, {encoder.num_heads} heads",
        f"{decoder.embed_dim} wide, {decoder.depth} blocks, {decoder.num_heads} heads",
        f"{cost.encoder_params / 1e6:.2f} M + {cost.decoder_params / 1e6:.2f} M = {cost.params / 1e6:.2f} M",
        *(f"{f / 1e9:.2f} G" for f in (cost.encoder_flops, cost.decoder_flops, cost.step_flops, cost.encode_flops)),
    )
    return f"| {' | '.join(cells)} |\n"


def with_table(page: str) -> str:
    """The page with its table replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the table is up to date")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    fresh = with_table(page)
    if not args.check:
        PAGE.write_text(fresh, encoding="utf-8")
    elif fresh != page:
        raise SystemExit(f"{PAGE} is out of date; run: python benchmarks/model_table.py")


if __name__ == "__main__":
    main()
