"""The README's pictures of the live page: `python -m tests.screenshots [DIRECTORY]`."""

import asyncio
import random
import sys
from contextlib import suppress
from pathlib import Path

from tests.browser import DESKTOP, PHONE, chromium
from tests.live_stack import live_stack

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_S = 20.0
PICTURES = {"page.png": (DESKTOP, "light"), "page-dark.png": (DESKTOP, "dark"), "page-phone.png": (PHONE, "light")}


async def take(directory: Path) -> None:
    """Loads two small workers for a while and looks."""
    async with live_stack(verify_s=0.035, draft_s=0.012) as up, chromium() as browser:
        load = asyncio.create_task(up.load(12, random.Random(7)))
        try:
            pages = []
            for name, ((width, height), scheme) in PICTURES.items():
                page = await browser.new_page(
                    viewport={"width": width, "height": height},
                    color_scheme="dark" if scheme == "dark" else "light",
                )
                await page.goto(up.url)
                pages.append((name, page))
            await asyncio.sleep(WARM_UP_S)
            for name, page in pages:
                await page.screenshot(path=directory / name, full_page=True)
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    target.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(target))
