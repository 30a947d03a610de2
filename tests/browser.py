"""A headless Chromium of the system, driven by Playwright, for pages with a script."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    """The program, by the variable CHROMIUM or as the system has it."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


def launched(playwright) -> "Browser":
    return playwright.chromium.launch(executable_path=chromium(), args=list(_FLAGS))


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    if find_spec("playwright") is None:
        pytest.skip("playwright, which drives the browser, is not installed")
    if chromium() is None:
        pytest.skip("no Chromium here; install one, or name it by the variable CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = launched(playwright)
        yield opened
        opened.close()
