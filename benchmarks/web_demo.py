"""How long the page of `mae web` takes to open and to reconstruct, in a headless Chromium on one thread.

    python benchmarks/web_demo.py                   # the demo's model, with random weights: as fast as a trained one
    python benchmarks/web_demo.py --model RUN

Needs playwright and a Chromium, which the variable CHROMIUM may name. *Opening* counts from the address to the first
reconstruction, each time in a browser without a cache; *reconstruction* from a drawn patch to its answer. Medians and
quartiles. Goals for the demo's model: 3 s and 150 ms.
"""

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import perf_counter

import numpy as np
import torch
from playwright.sync_api import Browser, sync_playwright

from mae.bench.report import machine, markdown_row, script_parser, write_figures
from mae.models.file import save
from mae.models.presets import create_model
from mae.recipes import recipe_config
from mae.web.serve import make_server
from mae.web.site import write_site

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu"]
_COUNT_ANSWERS = """window.times = [];
document.addEventListener("reconstructed", ({detail}) => window.times.push(detail.milliseconds));"""


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a run folder or a .safetensors file (default: the demo's model)")
    parser.add_argument("--opened", type=int, default=5, help="how often the page is opened")
    parser.add_argument("--reconstructed", type=int, default=50, help="how many masks are reconstructed")
    return parser.parse_args()


def write_demo_model(path: Path) -> None:
    """The model that `mae demo` trains, with random weights."""
    config = recipe_config("demo")
    assert isinstance(config.method, Mapping)  # what the recipe says of it
    torch.manual_seed(0)
    save(create_model(config.model, **config.method, mean=(0.5,) * 3, std=(0.25,) * 3).eval(), path)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the page in the folder, on one thread."""
    server = make_server(folder)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/?threads=1"
    finally:
        server.shutdown()
        server.server_close()


def opening(browser: Browser, address: str) -> float:
    """Milliseconds from the address to the first reconstruction."""
    with browser.new_context() as context:
        page = context.new_page()
        page.add_init_script(_COUNT_ANSWERS)
        began = perf_counter()
        page.goto(address)
        page.wait_for_function("() => window.times.length > 0")
        return 1000 * (perf_counter() - began)


def reconstructing(browser: Browser, address: str, count: int) -> list[float]:
    """Milliseconds of so many reconstructions, after some that warm up."""
    warm_up = 5
    with browser.new_context() as context:
        page = context.new_page()
        page.add_init_script(_COUNT_ANSWERS)
        page.goto(address)
        for number in range(1, warm_up + count + 1):
            page.wait_for_function(f"() => window.times.length >= {number}")
            page.click("[data-mask=random]")
        times: list[float] = page.evaluate("() => window.times")
    return times[warm_up : warm_up + count]


def main() -> None:
    args = parse_args()
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if chromium is None:
        sys.exit("no Chromium here; install one, or name it by the variable CHROMIUM")
    with TemporaryDirectory() as place, sync_playwright() as playwright:
        model = args.model
        if model is None:
            model = Path(place) / "model.safetensors"
            write_demo_model(model)
        write_site(model, Path(place) / "site")
        with served(Path(place) / "site") as address:
            browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
            times = {
                "opening": [opening(browser, address) for _ in range(args.opened)],
                "reconstruction": reconstructing(browser, address, args.reconstructed),
            }
            figures = {
                "machine": {**machine(torch.device("cpu")), "chromium": browser.version},
                "milliseconds": times,
            }
            browser.close()
    print(figures["machine"])
    print(markdown_row(["", "median, ms", "quartiles"]))
    print(markdown_row(["---"] * 3))
    for name, taken in times.items():
        low, middle, high = np.percentile(taken, [25, 50, 75])
        print(markdown_row([name, f"{middle:.0f}", f"{low:.0f} to {high:.0f}"]))
    write_figures(args.out, figures)


if __name__ == "__main__":
    main()
