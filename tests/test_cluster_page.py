"""The live page as a browser shows it, and as whoever has no business there does not get it."""

import asyncio
import base64
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import ConsoleMessage, Page, Request, expect

from cluster.http_messages import Request as HttpRequest
from cluster.server import ServerConfig
from tests.browser import DESKTOP, PHONE, chromium
from tests.live_stack import LiveStack, live_stack


@asynccontextmanager
async def loaded(up: LiveStack, concurrency: int) -> AsyncIterator[None]:
    load = asyncio.create_task(up.load(concurrency, random.Random(1)))
    try:
        yield
    finally:
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load


async def http(up: LiveStack, path: str, *fields: str, host: str = "127.0.0.1") -> tuple[str, bytes]:
    """Head and body of an answer that ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", up.pages.port)
    writer.write("\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *fields, "", ""]).encode())
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode(), body


async def events(up: LiveStack, number: int, *fields: str) -> list[dict[str, Any]]:
    """So many of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", up.pages.port)
    writer.write("\r\n".join(["GET /events HTTP/1.1", "Host: localhost:1", *fields, "", ""]).encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert b"Content-Type: text/event-stream" in head
    views: list[dict[str, Any]] = []
    while len(views) < number:
        event = (await asyncio.wait_for(reader.readuntil(b"\n\n"), 10)).decode()
        match = re.fullmatch(r"id: (.*)\ndata: (.*)\n\n", event)
        assert match is not None
        view = json.loads(match[2])
        assert match[1] == f"{view['life']}/{view['trail']['number']}"
        views.append(view)
    writer.close()
    return views


async def at_rest(up: LiveStack, *fields: str) -> dict[str, Any]:
    """A view without steps in flight: its trail has them already, the scheduler's count has not."""
    async with asyncio.timeout(30):
        while True:
            [view] = await events(up, 1, *fields)
            if not any(worker["num_steps_in_flight"] for worker in view["scheduler"]["workers"]):
                return view


async def test_events_bring_each_step_and_go_on_where_they_ended() -> None:
    async with live_stack() as up:
        await up.client.generate([5, 6, 7], request_id="first", max_tokens=9, ignore_eos=True).aresult()
        view = await at_rest(up)
        assert view["model"] == "tiny"
        assert len(view["trail"]["steps"]) == view["scheduler"]["num_steps"] > 0
        seen = f"Last-Event-ID: {view['life']}/{view['trail']['number']}"
        await up.client.generate([5, 6, 7], request_id="second", max_tokens=9, ignore_eos=True).aresult()
        later = await at_rest(up, seen)
        assert 0 < len(later["trail"]["steps"]) < later["scheduler"]["num_steps"]
        other = await at_rest(up, f"Last-Event-ID: another/{view['trail']['number']}")
        assert len(other["trail"]["steps"]) == other["scheduler"]["num_steps"]


async def test_a_scheduler_that_is_away_is_said_to_be() -> None:
    async with live_stack() as up:
        up.link.scheduler = None
        reader, writer = await asyncio.open_connection("127.0.0.1", up.pages.port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b"event: away" in await asyncio.wait_for(reader.readuntil(b"\n\n"), 10) + await reader.readuntil(b"\n\n")
        writer.close()
        head, _ = await http(up, "/story?id=x")
        assert head.startswith("HTTP/1.1 503")
        up.link.scheduler = up.scheduler


async def test_it_answers_to_addresses_and_refuses_what_is_not_its_own() -> None:
    async with live_stack() as up:
        for host in ("127.0.0.1:1", "localhost", "[::1]:9464", "10.0.0.7"):
            assert (await http(up, "/", host=host))[0].startswith("HTTP/1.1 200"), host
        for host in ("evil.example", "127.0.0.1.evil.example", ""):  # somebody else's DNS may point here
            assert (await http(up, "/events", host=host))[0].startswith("HTTP/1.1 403"), host
        assert (await http(up, "/elsewhere"))[0].startswith("HTTP/1.1 404")
        head, body = await http(up, "/story?id=nobody%20knows")
        assert (head.split()[1], body) == ("200", b"nobody knows: never heard of it")


async def test_with_tokens_it_asks_for_an_operators(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("user-token\n")
    (tmp_path / "admin").write_text("admin-token\n")
    listen = ServerConfig(auth_token_file=tmp_path / "tokens", admin_token_file=tmp_path / "admin")
    async with live_stack(listen=listen, token="user-token") as up:
        for path in ("/", "/events", "/story?id=x"):
            head, _ = await http(up, path)
            assert head.startswith("HTTP/1.1 401")
            assert "WWW-Authenticate: Basic" in head
            for shown in (basic("user-token"), basic("wrong"), "Basic %%%", "Digest x", "Bearer user-token"):
                assert (await http(up, path, f"Authorization: {shown}"))[0].startswith("HTTP/1.1 401"), shown
        for shown in (basic("admin-token"), "Bearer admin-token"):
            assert (await http(up, "/", f"Authorization: {shown}"))[0].startswith("HTTP/1.1 200")
        assert len(await events(up, 1, f"Authorization: {basic('admin-token')}")) == 1
        assert (await http(up, "/metrics"))[0].startswith("HTTP/1.1 200")  # which hold no names


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"operator:{password}".encode()).decode()


@pytest.mark.parametrize(
    "head", [b"", b"\r\n", b"GET", b"\xff\xfe /events?id=%ff&&= HTTP/1.1\r\n: \r\nAuthorization\r\n"]
)
def test_heads_that_make_no_sense_are_read(head: bytes) -> None:
    request = HttpRequest.parsed(head)
    assert request.password() is None


async def test_watchers_are_few() -> None:
    async with live_stack(num_workers=1) as up:
        watching = [asyncio.create_task(events(up, 3)) for _ in range(8)]
        while up.pages._page is not None and up.pages._page._num_watchers < 8:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        assert (await http(up, "/events"))[0].startswith("HTTP/1.1 503")
        await asyncio.gather(*watching)


@asynccontextmanager
async def shown(up: LiveStack, size: tuple[int, int] = DESKTOP, **options: Any) -> AsyncIterator[Page]:
    """The page in a browser; whatever it complains about or asks of others fails the test."""
    complaints: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "getImageData" not in message.text:  # which only `pixels` asks for
            complaints.append(message.text)

    def on_request(request: Request) -> None:
        if not request.url.startswith((up.url, "data:")):
            complaints.append(f"asks for {request.url}")

    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": size[0], "height": size[1]}, **options)
        page.on("console", on_console)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", on_request)
        await page.goto(up.url)
        await expect(page.locator("#state")).to_have_text("live")
        yield page
        assert complaints == []


async def pixels(page: Page, selector: str) -> set[str]:
    """The colours of a canvas."""
    found: list[str] = await page.evaluate(
        """(selector) => {
          const canvas = document.querySelector(selector), {width, height} = canvas;
          const data = canvas.getContext("2d").getImageData(0, 0, width, height).data, found = new Set();
          for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255)
            found.add("#" + [0, 1, 2].map((j) => data[i + j].toString(16).padStart(2, "0")).join(""));
          return [...found];
        }""",
        selector,
    )
    return set(found)


async def painted(page: Page, selector: str, *names: str) -> None:
    """Returns once the canvas has all of these colours."""
    wanted = {await colour(page, name) for name in names}
    async with asyncio.timeout(15):
        while not wanted <= await pixels(page, selector):
            await page.wait_for_timeout(100)


async def colour(page: Page, name: str) -> str:
    value: str = await page.evaluate(
        "(name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()", name
    )
    return value


async def test_a_browser_sees_workers_blocks_plots_and_stories() -> None:
    async with live_stack(verify_s=0.02, draft_s=0.01) as up, loaded(up, 6), shown(up) as page:
        await expect(page.locator("#workers h3")).to_have_text(["worker-0", "worker-1"])
        await expect(page.locator("#tiles div", has_text="Running").locator("dd")).to_have_text(re.compile(r"[4-6]"))
        await painted(page, ".worker canvas.timeline", "planned", "verify", "drafting")
        await painted(page, ".worker canvas.map", "shared", "placeholder")
        await painted(page, ".worker canvas.map", "draft")
        for numbers in await page.locator(".worker .legend").all_inner_texts():  # each at one moment
            pool, draft_group = numbers.split("garbage")
            assert sum(int(number) for number in re.findall(r"\d+", pool)) == 160
            used, total = map(int, re.findall(r"\d+", draft_group))
            assert 0 <= used <= total == 96
        await expect(page.locator("#plot-acceptance canvas")).to_have_attribute("aria-label", re.compile(r"1: \d+ %"))
        await expect(page.locator("#plot-ttft .legend")).to_have_text(re.compile(r"median [\d.]+ m?s"))
        row = page.locator("#requests tr", has_text="chat-").first
        name = await row.locator("button").inner_text()
        await row.locator("button").focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#story-title")).to_have_text(name)
        await expect(page.locator("#story li").first).to_contain_text("submitted")
        await page.keyboard.press("Escape")
        await expect(page.locator("#dialog")).to_be_hidden()


async def test_it_says_so_when_the_server_goes_and_comes_back() -> None:
    async with live_stack(num_workers=1) as up, shown(up) as page:
        up.link.scheduler = None
        await expect(page.locator("#state")).to_have_text("the scheduler does not answer")
        up.link.scheduler = up.scheduler
        await expect(page.locator("#state")).to_have_text("live")


async def test_pausing_holds_the_page_still() -> None:
    async with live_stack(num_workers=1, verify_s=0.01) as up, loaded(up, 2), shown(up) as page:
        tokens = page.locator("#tiles div", has_text="Tokens per second").locator("dd")
        await expect(tokens).not_to_have_text("0")
        await page.get_by_role("button", name="Pause").click()
        before = await tokens.inner_text()
        await page.wait_for_timeout(1500)
        assert await tokens.inner_text() == before
        await page.get_by_role("button", name="Resume").click()
        await page.get_by_role("button", name="Theme").click()
        await page.get_by_role("button", name="Theme").click()
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious_and_nothing_is_cut_off_on_a_phone(scheme: Any) -> None:
    from axe_playwright_python.async_playwright import Axe

    async with (
        live_stack(num_workers=1, verify_s=0.01) as up,
        loaded(up, 3),
        shown(up, PHONE, color_scheme=scheme) as page,
    ):
        await expect(page.locator("#requests button").first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await check(page, Axe)
        await page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
        await page.get_by_role("button", name="Pause").click()
        await page.locator("#requests button").first.click()
        await expect(page.locator("#story li").first).to_contain_text("submitted")
        await check(page, Axe)


async def check(page: Page, axe: Any) -> None:
    """axe-core's rules, best practices among them."""
    violations = (await axe().run(page)).response["violations"]
    told = [f"{v['impact']} {v['id']}: {[node['target'] for node in v['nodes']]}" for v in violations]
    assert told == []
