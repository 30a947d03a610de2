"""The map of images in a real browser."""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from browser import browser  # noqa: F401
from exploration.planted import EACH, planted_images, planted_model

from mae.exploration import sections
from mae.exploration.run import explore

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

COUNT = 2 * EACH + 3
WAIT = 10_000  # milliseconds


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("mapped")
    planted_images(place / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mae.exploration.run.SECTIONS", sections.SECTIONS[:1])
        patch.chdir(place)
        page = explore(planted_model(place / "m.safetensors"), data="images", out="p.html", device="cpu", quiet=True)
    return (place / page).as_uri()


@pytest.fixture
def page(browser: "Browser", address: str) -> Iterator["Page"]:  # noqa: F811
    """The page when the map is drawn; nothing may be asked of any network, nothing may go wrong."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints: list[str] = []
    opened.set_default_timeout(WAIT)
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: complaints.append(request.url) if is_fetched(request.url, address) else None)
    opened.goto(address)
    opened.wait_for_selector("#map[data-ready=true]", timeout=WAIT)
    yield opened
    opened.close()
    assert complaints == []


def is_fetched(url: str, address: str) -> bool:
    return url != address and not url.startswith("data:")


def status(page: "Page") -> str:
    return page.locator("#map-status").inner_text()


def listed(page: "Page") -> list[str]:
    return page.locator("#map-list li").all_inner_texts()


def drawn(page: "Page") -> str:
    """The picture on the canvas, once what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("() => document.getElementById('map-canvas').toDataURL()")


def colours(page: "Page") -> int:
    """How many different colours the canvas has."""
    drawn(page)
    return page.evaluate(
        """() => {
          const canvas = document.getElementById("map-canvas");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        }"""
    )


def test_the_map_shows_pictures(page: "Page"):
    assert colours(page) > 500
    assert status(page).startswith(f"{COUNT} images.")
    assert page.locator("#map-legend button").all_inner_texts() == [f"cold ({EACH + 1})", f"warm ({EACH + 2})"] or (
        page.locator("#map-legend button").all_inner_texts() == [f"warm ({EACH + 2})", f"cold ({EACH + 1})"]
    )


def test_the_legend_tells_what_is_grey_and_keeps_counts_beside_names_of_any_script(
    browser: "Browser",  # noqa: F811
    address: str,
    tmp_path: Path,
):
    source = Path(address.removeprefix("file://")).read_text()
    held = re.search(r'(?<=id="map-data">).*?(?=</script>)', source, flags=re.DOTALL)[0]  # type: ignore[index]
    data = json.loads(held)
    labels = np.frombuffer(b64decode(data["labels"]), "<i4").copy()
    labels[:3] = -1
    data["labels"], data["classes"] = b64encode(labels.tobytes()).decode(), ["\u0628\u0627\u0631\u062f"] * 2
    changed = tmp_path / "changed.html"
    changed.write_text(source.replace(held, json.dumps(data)))
    opened = browser.new_page()
    opened.goto(changed.as_uri())
    opened.wait_for_selector("#map[data-ready=true]", timeout=WAIT)
    assert opened.inner_text("#map-legend > span") == "3 without a class in grey"
    name, count = opened.evaluate(
        """() => {
          const range = document.createRange();
          const key = document.querySelector("#map-legend button");
          const text = document.createTreeWalker(key, NodeFilter.SHOW_TEXT);
          return [0, key.textContent.indexOf("(")].map((at) => {
            let node = (text.currentNode = key) && text.nextNode();
            for (; at >= node.length; node = text.nextNode()) at -= node.length;
            range.setStart(node, at);
            range.setEnd(node, at + 1);
            return range.getBoundingClientRect().left;
          });
        }"""
    )
    assert name < count
    opened.close()


def test_what_the_keyboard_is_at_in_the_list_is_marked_on_all_sides(page: "Page"):
    page.fill("#map-search", "warm/")
    page.locator("#map-list button").nth(1).click()
    page.keyboard.press("Tab")
    inside = page.evaluate(
        """() => {
          const [side, entry] = [document.querySelector(".map-side"), document.activeElement];
          const { outlineOffset, outlineWidth } = getComputedStyle(entry);
          const reach = parseFloat(outlineOffset) + parseFloat(outlineWidth);
          const [box, around] = [entry.getBoundingClientRect(), side.getBoundingClientRect()];
          return box.left - reach >= around.left && box.right + reach <= around.right;
        }"""
    )
    assert inside


def test_search_by_name_and_then_by_image(page: "Page"):
    before = drawn(page)
    page.fill("#map-search", "Warm/0")
    assert status(page) == "10 found:" and all("warm/0" in text for text in listed(page))
    assert drawn(page) != before
    page.fill("#map-search", "same.png")
    page.locator("#map-list button").click()
    assert status(page) == "Nearest to warm/same.png \u00b7 warm:"
    nearest = listed(page)
    assert "selected" in nearest[0] and len(nearest) == 13
    assert "03.png" in nearest[1] and "cosine 1.00" in nearest[1] and "anew.jpg" in nearest[2]
    page.keyboard.press("Tab")  # the focus stays in the list
    page.keyboard.press("Enter")
    assert status(page).startswith("Nearest to warm/03.png")
    page.click("#map-clear")
    assert status(page).startswith(f"{COUNT} images.") and listed(page) == []
    assert drawn(page) == before and page.input_value("#map-search") == ""


def test_nothing_found_is_said(page: "Page"):
    page.fill("#map-search", "zebra")
    assert status(page) == "0 found:" and listed(page) == []


def test_a_class_alone(page: "Page"):
    key = page.locator("#map-legend button", has_text="cold")
    key.click()
    assert key.get_attribute("aria-pressed") == "true" and status(page) == f"{EACH + 1} found:"
    key.click()
    assert key.get_attribute("aria-pressed") == "false" and status(page).startswith(f"{COUNT} images.")


def test_by_keyboard_alone(page: "Page"):
    page.focus("#map-canvas")
    before = drawn(page)
    page.keyboard.press("+")
    zoomed = drawn(page)
    page.keyboard.press("ArrowLeft")
    moved = drawn(page)
    assert len({before, zoomed, moved}) == 3
    page.keyboard.press("0")
    assert drawn(page) == before
    page.keyboard.press("Enter")
    assert status(page).startswith("Nearest to ") and len(listed(page)) == 13
    page.keyboard.press("Escape")
    assert drawn(page) == before


def test_with_the_mouse(page: "Page"):
    box = page.locator("#map-canvas").bounding_box()
    assert box is not None
    before = drawn(page)
    data = json.loads(page.locator("#map-data").text_content() or "")
    pointed = None
    for step in range(1, 400):  # somewhere on the map there is an image
        x, y = box["x"] + box["width"] * (step % 20) / 20, box["y"] + box["height"] * (step // 20) / 20
        page.mouse.move(x, y)
        if page.locator("#map-hover").is_visible():
            pointed = page.locator("#map-hover").inner_text().split(" \u00b7 ")[0]
            break
    assert pointed in data["names"]
    page.mouse.click(x, y)
    assert status(page).startswith(f"Nearest to {pointed}")
    page.keyboard.press("Escape")
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    assert page.locator("#map-hover").is_hidden()
    page.mouse.wheel(0, -300)  # after a click into the map
    assert drawn(page) != before
    zoomed = drawn(page)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 40, steps=4)
    page.mouse.up()
    assert drawn(page) != zoomed and status(page).startswith(f"{COUNT} images.")  # a drag selects nothing


def test_the_wheel_scrolls_the_page_until_the_map_is_clicked(page: "Page"):
    before = drawn(page)
    box = page.locator("#map-canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.wheel(0, 200)
    page.wait_for_timeout(300)  # a wait for a condition would evaluate text, which the page forbids
    assert page.evaluate("() => window.scrollY") > 0
    assert drawn(page) == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen(browser: "Browser", address: str, width: int, scheme: str):  # noqa: F811
    opened = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    opened.goto(address)
    opened.wait_for_selector("#map[data-ready=true]", timeout=WAIT)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert colours(opened) > 500
    opened.close()


def test_no_other_script_runs(browser: "Browser", address: str, tmp_path: Path):  # noqa: F811
    source = Path(address.removeprefix("file://")).read_text()
    changed = tmp_path / "changed.html"
    changed.write_text(re.sub("</body>", "<script>document.title = 'changed'</script></body>", source))
    opened = browser.new_page()
    opened.goto(changed.as_uri())
    opened.wait_for_selector("#map[data-ready=true]", timeout=WAIT)
    assert opened.title() != "changed"
    opened.close()


def test_without_scripts_there_is_a_picture(browser: "Browser", address: str):  # noqa: F811
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(address)
    assert opened.locator("noscript img").is_visible() and opened.locator("#map").is_hidden()
    context.close()
