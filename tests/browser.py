"""A headless Chromium that is on this machine, or the reason to skip."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = (1280, 900), (390, 844)
SANDBOX = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's own does not run as root


def executable() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Skips the test where there is none."""
    path = executable()
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=[*SANDBOX, "--disable-gpu"])
        try:
            yield browser
        finally:
            await browser.close()
