"""A real browser for tests of pages: the distribution's headless Chromium, driven by Playwright."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The path of a Chromium on this machine, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def why_no_browser() -> str:
    """Why pages cannot be tested here; empty when they can."""
    if importlib.util.find_spec("playwright") is None:
        return "needs the package playwright"
    return "" if find_chromium() else "needs chromium (apt-get install chromium-headless-shell)"


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless browser for the context. Without a sandbox, as root can have none: open only your own pages."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
