"""A headless Chromium for tests of pages. Where there is none, the tests say so and are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDY = "install it with: apt-get install chromium; or: python -m playwright install chromium-headless-shell"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, as a playwright Browser. Skips the test if it cannot be started."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make test installs it")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    with playwright.sync_playwright() as driver:
        try:
            # Without its sandbox, which root in a container does not have; the pages are our own.
            browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            if found is not None:
                raise
            pytest.skip(f"no Chromium on this machine ({error.message.splitlines()[0]}); {REMEDY}")
        yield browser
        browser.close()


@dataclass
class Visit:
    """A page that is open in a browser, and what went wrong on it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def visit(browser: Any, url: str, **context: Any) -> Iterator[Visit]:
    """Open a page. Errors of its scripts, words on its console and dialogs count as errors."""
    opened = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | context)
    opened.set_default_timeout(120_000)  # on a busy machine a browser takes its time
    visited = Visit(opened.new_page())
    visited.page.on("console", lambda message: visited.errors.append(f"{message.type}: {message.text}"))
    visited.page.on("pageerror", lambda error: visited.errors.append(str(error)))
    visited.page.on("dialog", lambda dialog: (visited.errors.append(dialog.message), dialog.dismiss()))
    visited.page.on("request", lambda request: visited.requests.append(request.url))
    visited.page.goto(url)
    visited.page.wait_for_function("typeof charts !== 'undefined' && charts.size > 0")
    yield visited
    opened.close()
