"""The page in a browser: drawn masks reach the model, and nothing leaves the machine."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from browser import browser  # noqa: F401 - a fixture
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from skimage import data
from tiny import tiny_model

from mae.errors import MAEError
from mae.models.file import load_model, save
from mae.models.given_images import crop_image, given_images
from mae.models.preprocess import preprocessing_of
from mae.web.graph import MaskedGraph
from mae.web.serve import make_server
from mae.web.site import STATIC, VENDOR, vendored, write_site

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SOURCES = Path(__file__).parents[2] / "src" / "mae" / "web"
COLUMNS, NUMBER = 6, 24  # of the tiny model's 16x24 pixels in patches of 4x4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        vendored()
    except MAEError as missing:
        pytest.skip(f"no onnxruntime-web: {missing}")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    folder = tmp_path_factory.mktemp("site")
    save(tiny_model(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)).eval(), folder / "model.safetensors")
    write_site(folder / "model.safetensors", folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = make_server(site)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def opened(browser: "Browser", address: str) -> Iterator[Callable[..., "Page"]]:  # noqa: F811
    """Opens the page; at the end nothing may have failed, and nothing been asked of another machine."""
    pages, asked, told = [], [], []

    def open_page(
        words: str = "?lang=en", *, width: int = 1280, prepare: Callable[["Page"], None] | None = None
    ) -> "Page":
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: told.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: told.append(str(error)))
        page.add_init_script(
            """window.answers = 0;
            document.addEventListener("reconstructed", ({detail}) => { window.answers++; window.last = detail; });"""
        )
        if prepare is not None:
            prepare(page)
        page.goto(address + words)
        if prepare is None:
            page.wait_for_function("() => window.answers > 0", timeout=20_000)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not told
    assert asked and all(url.startswith((address, "blob:" + address)) for url in asked)


def last(page: "Page") -> dict[str, Any]:
    """What the page said last, once all changes are answered."""
    page.wait_for_timeout(150)
    found: dict[str, Any] = page.evaluate(
        """() => ({hidden: [...window.last.hidden], pixels: [...window.last.pixels], patches: [...window.last.patches],
            picture: [...window.last.pictures.picture], informed: [...window.last.pictures.informed],
            attention: [...window.last.attention]})"""
    )
    return found


def middle(page: "Page", cell: int, canvas: str = "#masked") -> tuple[float, float]:
    """Of a patch on the canvas, in pixels of the window."""
    box = page.locator(canvas).bounding_box()
    assert box is not None
    rows = NUMBER // COLUMNS
    return (
        box["x"] + (cell % COLUMNS + 0.5) * box["width"] / COLUMNS,
        box["y"] + (cell // COLUMNS + 0.5) * box["height"] / rows,
    )


def test_mouse_and_keyboard_hide_patches_and_the_browser_computes_what_pytorch_does(
    opened: Callable[..., "Page"], site: Path
):
    page = opened()
    assert sum(last(page)["hidden"]) == 18  # three quarters at the start
    page.click("[data-mask=clear]")
    page.mouse.move(*middle(page, 1))
    page.mouse.down()
    for cell in (2, 8, 14):
        page.mouse.move(*middle(page, cell))
    page.mouse.up()
    page.focus("#masked")  # the keyboard is where the mouse was first
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "Space", "ArrowLeft", "ArrowLeft", "ArrowDown", "Space"):
        page.keyboard.press(key)
    found = last(page)
    assert [cell for cell, value in enumerate(found["hidden"]) if value] == [1, 2, 8, 12, 14, 18]
    assert page.inner_text("#cell") == "Row 4, column 1: hidden"
    assert page.inner_text("#status").startswith("6 of 24 patches hidden (25 %)")

    model = load_model(site.parent / "model.safetensors")
    with torch.no_grad():
        expected = MaskedGraph(model)(
            torch.tensor(found["pixels"]).reshape(1, 3, 16, 24), torch.tensor(found["hidden"], dtype=torch.bool)[None]
        )
    for name in ("patches", "picture", "informed", "attention"):
        assert np.abs(np.array(found[name]) - expected[name].flatten().numpy()).max() < 1e-3, name


def test_a_second_press_shows_a_patch_again_and_one_always_stays(opened: Callable[..., "Page"]):
    page = opened()
    page.click("[data-mask=clear]")
    page.mouse.click(*middle(page, 7))
    assert [cell for cell, value in enumerate(last(page)["hidden"]) if value] == [7]
    page.mouse.click(*middle(page, 7))
    assert sum(last(page)["hidden"]) == 0
    page.click("[data-mask=invert]")
    assert sum(last(page)["hidden"]) == NUMBER - 1
    page.mouse.click(*middle(page, 0))
    assert sum(last(page)["hidden"]) == NUMBER - 1
    assert page.inner_text("#status") == page.inner_text("#cell") == "One patch must stay visible."
    page.focus("#masked")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#status").startswith("23 of 24") and page.inner_text("#cell") == "Row 1, column 2: hidden"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Space")
    assert page.inner_text("#status") == page.inner_text("#cell") == "One patch must stay visible."
    page.click("#examples button:nth-child(2)")
    last(page)
    assert page.inner_text("#status").startswith("23 of 24")


def test_a_fast_drag_leaves_no_holes_and_the_main_button_alone_draws(opened: Callable[..., "Page"]):
    page = opened()
    page.click("[data-mask=clear]")
    page.mouse.move(*middle(page, 6))
    page.mouse.down(button="right")
    page.mouse.move(*middle(page, 7))
    page.mouse.up(button="right")
    assert sum(last(page)["hidden"]) == 0
    page.mouse.move(*middle(page, 6))
    page.mouse.down()
    page.mouse.move(*middle(page, 11))
    x, y = middle(page, 17)
    page.mouse.move(x + 60, y)  # past the border, and back again
    page.mouse.move(x, y)
    page.mouse.up()
    assert [cell for cell, value in enumerate(last(page)["hidden"]) if value] == [*range(6, 12), 17]


@pytest.mark.parametrize(("name", "count"), [("random", 12), ("block", 12), ("grid", 18)])
def test_buttons_make_masks(opened: Callable[..., "Page"], name: str, count: int):
    page = opened()
    page.fill("#ratio", "50")
    page.click(f"[data-mask={name}]")
    hidden = np.array(last(page)["hidden"]).reshape(-1, COLUMNS)
    assert hidden.sum() == count
    if name == "block":
        rows, columns = hidden.any(axis=1).sum(), hidden.any(axis=0).sum()
        assert rows * columns == count


def test_the_largest_block_is_a_rectangle_too(opened: Callable[..., "Page"]):
    page = opened()
    page.fill("#ratio", "95")
    page.click("[data-mask=block]")
    hidden = np.array(last(page)["hidden"]).reshape(-1, COLUMNS)
    assert hidden.any(axis=1).sum() * hidden.any(axis=0).sum() == hidden.sum() < NUMBER


def test_ones_own_picture_is_cut_to_its_middle_and_stays_here(opened: Callable[..., "Page"], tmp_path: Path):
    page = opened()
    picture = np.zeros((40, 120, 3), dtype=np.uint8)
    picture[:, 30:90, 0] = 200  # the middle 60x40 are what is seen
    Image.fromarray(picture).save(tmp_path / "own.png")
    page.set_input_files("#file", tmp_path / "own.png")
    pixels = np.array(last(page)["pixels"]).reshape(3, 16, 24)
    assert np.abs(pixels[0] - 200 / 255).max() < 0.02 and pixels[1:].max() == 0
    (tmp_path / "no.png").write_text("no picture")
    page.set_input_files("#file", tmp_path / "no.png")
    page.wait_for_selector("#failure:visible")
    assert page.inner_text("#failure") == "This file is not a picture that the browser can show: no.png"


def plain(folder: Path, name: str, colour: tuple[int, int, int]) -> Path:
    """A picture of one colour."""
    Image.new("RGB", (60, 40), colour).save(folder / name)
    return folder / name


def colour(page: "Page") -> list[int]:
    """The mean colour of what the model saw last."""
    pixels = np.array(last(page)["pixels"]).reshape(3, -1)
    return [round(255 * value) for value in pixels.mean(axis=1)]


def test_the_picture_that_was_chosen_last_stays(opened: Callable[..., "Page"], tmp_path: Path):
    page = opened()
    page.evaluate(
        """() => { const read = window.createImageBitmap;
            window.createImageBitmap = async (source, ...options) => {
                if (source.name === "slow.png") await new Promise(resolve => { window.readSlow = resolve; });
                return read(source, ...options); }; }"""
    )
    page.set_input_files("#file", plain(tmp_path, "slow.png", (200, 0, 0)))
    page.set_input_files("#file", plain(tmp_path, "quick.png", (0, 0, 200)))
    assert colour(page) == [0, 0, 200]
    page.evaluate("() => window.readSlow()")
    assert colour(page) == [0, 0, 200]
    page.set_input_files("#file", tmp_path / "slow.png")  # the same file once more
    page.evaluate("() => window.readSlow()")
    assert colour(page) == [200, 0, 0]


def test_what_is_done_while_the_model_loads_is_kept(opened: Callable[..., "Page"], tmp_path: Path):
    held: list[Any] = []
    page = opened(prepare=lambda page: page.route("**/*.onnx", lambda route: held.append(route)))
    page.wait_for_selector("#examples img")
    page.click("[data-mask=random]")
    page.set_input_files("#file", plain(tmp_path, "own.png", (0, 0, 200)))
    page.click("[data-mask=clear]")
    page.check("input[value=informed]")
    page.check("#attention")
    page.mouse.click(*middle(page, 7))
    page.focus("#masked")
    page.click("[data-language=vi]")
    page.wait_for_timeout(150)
    assert page.inner_text("#status") == "Đang tải mô hình …" and not page.is_visible("#failure")
    held[0].continue_()
    page.wait_for_function("() => window.answers > 0", timeout=20_000)
    assert colour(page) == [0, 0, 200]
    assert [cell for cell, value in enumerate(last(page)["hidden"]) if value] == [7]


def test_a_failure_speaks_the_language_of_the_page_and_goes_with_the_next_action(
    opened: Callable[..., "Page"], tmp_path: Path
):
    page = opened()
    (tmp_path / "no.png").write_text("no picture")
    page.set_input_files("#file", tmp_path / "no.png")
    page.wait_for_selector("#failure:visible")
    page.click("[data-language=vi]")
    assert page.inner_text("#failure") == "Tệp này không phải là ảnh mà trình duyệt mở được: no.png"
    page.click("[data-mask=grid]")
    assert not page.is_visible("#failure")


@pytest.mark.parametrize("size", [(24, 16), (100, 150), (301, 97), (13, 11)])
def test_pictures_are_cropped_as_in_evaluation(
    opened: Callable[..., "Page"], site: Path, tmp_path: Path, size: tuple[int, int]
):
    photo = Image.fromarray(data.chelsea()).resize(size, Image.Resampling.LANCZOS)
    photo.save(tmp_path / "photo.png")
    page = opened()
    page.set_input_files("#file", tmp_path / "photo.png")
    found = np.array(last(page)["pixels"]).reshape(3, 16, 24)
    wanted = preprocessing_of(load_model(site.parent / "model.safetensors").config)
    error = np.abs(found - crop_image(given_images(tmp_path / "photo.png", wanted)[0], wanted).numpy())
    if size == (24, 16):  # the model's own size
        assert error.max() < 1e-6
    assert error.mean() < 0.02 and error.max() < 0.1  # browsers have filters of their own


def test_a_picture_has_the_values_of_its_file_whatever_its_gamma(opened: Callable[..., "Page"], tmp_path: Path):
    linear = PngInfo()
    linear.add(b"gAMA", struct.pack(">I", 100_000))
    Image.new("RGB", (60, 40), (128, 128, 128)).save(tmp_path / "linear.png", pnginfo=linear)
    page = opened()
    page.set_input_files("#file", tmp_path / "linear.png")
    assert colour(page) == [128, 128, 128]


def test_attention_of_the_patch_under_the_pointer(opened: Callable[..., "Page"]):
    page = opened()
    page.click("[data-mask=clear]")
    last(page)
    before = page.evaluate("document.getElementById('input').toDataURL()")
    page.mouse.move(*middle(page, 3, "#input"))
    assert page.evaluate("document.getElementById('input').toDataURL()") == before
    page.check("#attention")
    page.mouse.move(*middle(page, 4, "#input"))
    assert page.evaluate("document.getElementById('input').toDataURL()") != before


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("language", ["en", "vi"])
def test_both_languages_say_everything_and_fit(opened: Callable[..., "Page"], language: str, width: int):
    page = opened(f"?lang={language}", width=width)
    texts = json.loads((SOURCES / STATIC / f"{language}.json").read_text())
    assert page.title() == texts["title"] and page.evaluate("document.documentElement.lang") == language
    for name in page.evaluate("[...document.querySelectorAll('[data-text]')].map(part => part.dataset.text)"):
        assert page.locator(f"[data-text={name}]").first.text_content() == texts[name]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("getComputedStyle(document.getElementById('drop')).display") == "flex"  # its text is centred
    other = "vi" if language == "en" else "en"
    page.click(f"[data-language={other}]")
    page.wait_for_function(f"() => document.documentElement.lang == {other!r}")
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, canvas")].filter(part =>
            !(part.innerText || part.getAttribute("aria-label") || part.labels?.length)).length"""
    )
    assert unnamed == 0


def test_a_label_keeps_apart_from_its_value_at_any_width(opened: Callable[..., "Page"]):
    page = opened()
    for width in range(360, 400, 4):
        page.set_viewport_size({"width": width, "height": 800})
        gap = page.evaluate(
            """() => {
                const range = document.createRange();
                range.selectNodeContents(document.querySelector("[data-text=ratio]"));
                const value = document.getElementById("ratio-shown").getBoundingClientRect();
                const beside = [...range.getClientRects()].filter((line) => line.bottom > value.top + 4);
                return value.left - Math.max(0, ...beside.map((line) => line.right));
            }"""
        )
        assert gap > 4, width


def test_opened_as_a_file_the_page_says_what_it_needs(browser: "Browser", site: Path, opened: Callable[..., "Page"]):  # noqa: F811
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    said = page.locator("main").get_by_text("works only from a server")
    said.wait_for(state="visible", timeout=10_000)
    assert "python -m http.server" in said.inner_text()
    page.close()
    assert opened().get_by_text("works only from a server").count() == 0


def test_the_pictures_are_no_blanks(opened: Callable[..., "Page"]):
    page = opened()
    for name in ("input", "masked", "reconstruction", "error"):
        colours = page.evaluate(
            """name => { const canvas = document.getElementById(name);
                const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                return new Set(new Uint32Array(data.buffer)).size; }""",
            name,
        )
        assert colours > 20, name


@pytest.mark.parametrize("threads", [1, 3])
def test_pages_that_share_memory_compute_with_the_threads_asked_for(opened: Callable[..., "Page"], threads: int):
    page = opened(f"?lang=en&threads={threads}")
    assert page.evaluate("crossOriginIsolated") and len(page.workers) == threads - 1


def test_without_its_server_the_page_goes_on_and_says_what_it_lacks(
    site: Path,
    browser: "Browser",  # noqa: F811
):
    server = make_server(site)
    thread = Thread(target=server.serve_forever)
    thread.start()
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script('document.addEventListener("reconstructed", ({detail}) => { window.last = detail; });')
    page.goto(f"http://127.0.0.1:{server.server_address[1]}/?lang=en")
    page.wait_for_function("() => window.last", timeout=20_000)
    server.shutdown()
    thread.join()
    server.server_close()
    page.click("#examples button:nth-child(2)")
    page.wait_for_selector("#failure:visible")
    assert page.inner_text("#failure").startswith("examples/coffee.png could not be loaded")
    page.click("[data-language=vi]")
    assert page.inner_text("#failure").startswith("Không tải được examples/coffee.png")
    page.click("[data-mask=random]")
    assert not page.is_visible("#failure") and not errors
    page.close()


def test_the_languages_have_the_same_texts_and_places():
    texts = [json.loads((SOURCES / STATIC / f"{language}.json").read_text()) for language in ("en", "vi")]
    assert texts[0].keys() == texts[1].keys()
    for name in texts[0]:
        assert sorted(part.split("}")[0] for part in texts[0][name].split("{")[1:]) == sorted(
            part.split("}")[0] for part in texts[1][name].split("{")[1:]
        ), name


def test_a_checkout_without_the_runtime_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mae.web.site.RUNTIME", ("absent.wasm",))
    with pytest.raises(MAEError, match=r"absent.wasm .*make web"):
        vendored()


def test_the_wheel_carries_the_runtime_and_the_lock_file_names_no_registry():
    root = SOURCES.parents[2]
    assert f"src/mae/web/{VENDOR}/*" in (root / "pyproject.toml").read_text()
    locked = json.loads((root / "package-lock.json").read_text())["packages"]
    assert all("integrity" in entry and "resolved" not in entry for name, entry in locked.items() if name)
