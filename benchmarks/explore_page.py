"""Whether the map of `mae explore` stays fluent: size of the page, time until it is drawn, time of its frames.

The images are drawn, the model is small and never trained; `--page` measures a page that is there instead. Needs
Playwright and a Chromium of the system, which has no GPU here: a machine with one is faster.
"""

import argparse
import platform
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from mae.data.sources.memory import whole_array
from mae.evaluation.common.task import UnlabelledTask
from mae.evaluation.extractors.extractor import model_extractor
from mae.exploration.embedding_map import embedding_map
from mae.exploration.explored import ExploreRun
from mae.models.presets import create_model
from mae.report.html.page import write_page

SIDE, CLASSES, FRAMES = 32, 20, 120
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip

MEASURE = """async ({ what, frames }) => {
  const canvas = document.getElementById("map-canvas");
  const { left, top, width, height } = canvas.getBoundingClientRect();
  const at = { clientX: left + width / 2, clientY: top + height / 2, pointerId: 1, bubbles: true };
  canvas.setPointerCapture = () => {};
  canvas.focus();
  const act = {
    zoom: (frame) => canvas.dispatchEvent(new WheelEvent("wheel", { ...at, cancelable: true,
      deltaY: frame < frames / 2 ? -60 : 60 })),
    pan: (frame) => {
      const clientX = at.clientX + 8 * Math.abs((frame % 40) - 20);
      canvas.dispatchEvent(new PointerEvent("pointermove", { ...at, clientX }));
    },
    point: (frame) => canvas.dispatchEvent(new PointerEvent("pointermove", { ...at,
      clientX: left + (width * (frame % 60)) / 60, clientY: top + height / 3 + frame })),
  }[what];
  if (what === "pan") canvas.dispatchEvent(new PointerEvent("pointerdown", at));
  const next = () => new Promise(requestAnimationFrame);
  const times = [];
  let before = await next();
  for (let frame = 0; frame < frames; frame += 1) {
    act(frame);
    const now = await next();
    times.push(now - before);
    before = now;
  }
  if (what === "pan") canvas.dispatchEvent(new PointerEvent("pointercancel", at));
  return times;
}"""


def made_page(folder: Path, count: int) -> Path:
    """A page with the map alone, of images in twenty kinds of colour and texture."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, count)
    colours = rng.uniform(40, 215, (CLASSES, 3))[labels]
    coarse = rng.normal(colours[:, None, None], 40, (count, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    images = (coarse + rng.normal(0, 12, (count, SIDE, SIDE, 3))).clip(0, 255).astype(np.uint8)
    torch.manual_seed(0)
    model = create_model("mae_vit_lesson_patch4", img_size=SIDE, mean=(0.5,) * 3, std=(0.25,) * 3)
    task = UnlabelledTask(
        extractor=model_extractor(model, name="never trained"),
        source=whole_array(images, name="drawn", note=""),
        folder=folder,
        device=torch.device("cpu"),
        seed=0,
        console=Console(),
    )
    run = ExploreRun(
        folder=None,
        checkpoints={},
        task=task,
        labels=torch.from_numpy(labels),
        class_names=tuple(f"kind {kind}" for kind in range(CLASSES)),
        projection="pca",
        pictures=folder,
    )
    write_page(folder / "explore.html", title="Drawn images", facts=[], sections=[embedding_map(run)])
    return folder / "explore.html"


def measured(page: Page, path: Path) -> None:
    started = time.perf_counter()
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("#map[data-ready=true]", timeout=60_000)
    print(f"until it is drawn: {time.perf_counter() - started:.2f} s, page of {path.stat().st_size / 1e6:.1f} MB")
    page.keyboard.press("Tab")
    page.locator("#map-canvas").scroll_into_view_if_needed()
    processor = page.context.new_cdp_session(page)
    print("ms between frames (16.7 is the screen's own pace)      median     95 %    worst")
    for slower in (1, 6):
        processor.send("Emulation.setCPUThrottlingRate", {"rate": slower})
        for what in ("zoom", "pan", "point"):
            times = np.array(page.evaluate(MEASURE, {"what": what, "frames": FRAMES}))
            name = f"{what}{'' if slower == 1 else f', script {slower} times slower'}"
            print(f"{name:<53}{np.median(times):8.1f}{np.quantile(times, 0.95):9.1f}{times.max():9.1f}")
    processor.send("Emulation.setCPUThrottlingRate", {"rate": 1})
    started = time.perf_counter()
    page.fill("#map-search", "1")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    print(f"search: {1000 * (time.perf_counter() - started):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    program = next(filter(None, map(shutil.which, NAMES)), None)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        path = asked.page or made_page(Path(place), asked.images)
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        print(f"Chromium {browser.version} without a GPU, {platform.processor() or platform.machine()}")
        measured(browser.new_page(viewport={"width": 1280, "height": 900}), path)
        browser.close()


if __name__ == "__main__":
    main()
