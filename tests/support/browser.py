"""A real browser for tests of pages: the distribution's headless Chromium, driven by Playwright."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# What Chromium says of a request that it cancelled because an interface of the machine came or went: tests beside make
# some. Pages send such a request again, which tests of `reach` hold.
_NETWORK_CHANGED: Final = "net::ERR_NETWORK_CHANGED"

LOST: Final = "net::ERR_CONNECTION_RESET"  # Chromium's line about a request that `lose_first` lost
_NOTE_STATUS: Final = """
window.statuses = [];
addEventListener("DOMContentLoaded", () => {
  const status = document.getElementById("status");
  const note = () => { if (status.textContent) statuses.push(status.textContent); };
  new MutationObserver(note).observe(status, { childList: true });
});
"""

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


def watch_faults(
    page: Page, origin: str, faults: list[str], expected: tuple[str, ...] = ()
) -> None:
    """Collect what goes wrong on a page, and requests to elsewhere than ``origin``, but for lines with an expected text."""
    allowed = (*expected, _NETWORK_CHANGED)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda sent: sent.url.startswith(origin) or faults.append(sent.url))
    page.on(
        "console",
        lambda line: (
            line.type != "error"
            or any(text in line.text for text in allowed)
            or faults.append(line.text)
        ),
    )


def lose_first(page: Page, pattern: str, times: int = 1) -> list[str]:
    """Lose the first requests to each path of a pattern as a broken connection does. Returns the lost paths as they come."""
    lost: list[str] = []

    def answer(route, request):
        path = request.url.partition("?")[0]
        if lost.count(path) == times:
            route.continue_()
            return
        lost.append(path)
        route.abort("connectionreset")

    page.route(pattern, answer)
    page.add_init_script(_NOTE_STATUS)
    return lost


def stall(page: Page, pattern: str, patience_ms: int) -> None:
    """Leave every request without an answer, as a connection does that is dead at its other end; the page's patience is
    cut to what a test can wait for. `Page.unroute_all` ends it."""
    page.evaluate(
        "patience => { const real = setTimeout;"
        " window.setTimeout = (run, ms, ...more) => real(run, ms === patience ? 300 : ms, ...more); }",
        patience_ms,
    )
    page.route(pattern, lambda route: None)


def read_statuses(page: Page) -> list[str]:
    """What the page's status line has said since `lose_first`, in its order."""
    return page.evaluate("statuses")
