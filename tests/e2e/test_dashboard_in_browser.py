"""The dashboard in Debian's Chromium: keyboard, live updates, hostile text, many rollouts."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from capture_server.app import create_app
from capture_server.config import load_settings
from capture_server.in_thread import served_in_thread
from capture_server.stores.memory import MemoryCaptureStore
from middleware.protocols import CallIntent
from middleware.records import ParentResolutionStatus, TokenEntry, stamp_lineage

ROLLOUTS = 10_000
CALLS = 500
OWN = "document.title='owned'"
HOSTILE = f'</pre><script>{OWN}</script><img src=x onerror="{OWN}">'
TOKEN = "the-control-token-of-this-browser"


def entry(rollout: str, call: str, text: str, parent: TokenEntry | None = None) -> TokenEntry:
    """A record of two sampled tokens that extends ``parent``."""
    before = [] if parent is None else [*parent.prompt_token_ids, *parent.generation_token_ids]
    made = TokenEntry(
        rollout_id=rollout,
        model_call_id=call,
        model="m",
        prompt_token_ids=[*before, 1, 2, 3],
        generation_token_ids=[7, 8],
        generation_log_probs=[-0.1, -3.0],
        output_items=[{"type": "message", "content": [{"type": "output_text", "text": text}]}],
        created_at=float(len(before) + 1),
    )
    made.finish_reason = "stop"
    status = ParentResolutionStatus.ROOT if parent is None else ParentResolutionStatus.RESOLVED
    stamp_lineage(made, parent.model_call_id if parent else None, parent_resolution=status)
    return made


async def filled_store() -> MemoryCaptureStore:
    """10,000 rollouts; ``long`` has 500 calls in one conversation; ``evil`` has hostile text."""
    store = MemoryCaptureStore()
    for number in range(ROLLOUTS):
        await store.put(entry(f"r{number:05}", "c0", "hello"))
    parent: TokenEntry | None = None
    for number in range(CALLS):
        parent = entry("long", f"c{number:03}", "hello", parent)
        await store.put(parent)
    await store.put(entry("evil", "c0", HOSTILE))
    return store


@asynccontextmanager
async def serving(token: str | None) -> AsyncIterator[tuple[str, MemoryCaptureStore]]:
    store = await filled_store() if token is None else MemoryCaptureStore()
    app = create_app(load_settings(store="memory:", control_token=token), store=store)
    async with served_in_thread(app) as url:
        yield url, store
    await store.close()


class Served:
    """A sidecar in a thread with an event loop of its own (Playwright's is synchronous)."""

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self._token) as (self.url, self.store):
            self._ready.set()
            await self._done.wait()

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(40)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(20)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's, headless."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed (bash .ci/system_packages)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One sidecar for all pages that need no token."""
    with Served() as server:
        yield server


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A fresh page that fails the test on any script error."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    opened = context.new_page()
    opened.set_default_timeout(15_000)
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    context.close()
    assert errors == []


def test_finding_a_rollout_among_ten_thousand_with_the_keyboard(page: Page, served: Served) -> None:
    """Skip link, filter, Enter, and down to a call, without a mouse."""
    page.goto(f"{served.url}/ui")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.locator("#prefix").focus()
    page.keyboard.type("lon")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.locator("#r-long").focus()
    page.keyboard.press("Enter")
    expect(page.locator("table.tree tbody tr")).to_have_count(CALLS)
    page.locator("#c-c499").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Call c499")).to_be_visible()
    expect(page.get_by_role("link", name="c498")).to_be_visible()


def test_the_list_is_paged_and_sorted(page: Page, served: Served) -> None:
    """A hundred at a time; a heading sorts the page and says so."""
    page.goto(f"{served.url}/ui/rollouts?prefix=r")
    expect(page.locator("tbody tr")).to_have_count(100)
    page.get_by_role("link", name="Next page").click()
    expect(page.locator("#r-r00100")).to_be_visible()
    page.goto(f"{served.url}/ui/rollouts?limit=100")
    page.locator("#sort-calls").click()
    page.locator("#sort-calls").click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("calls")
    expect(page.locator("tbody tr").first.locator("th")).to_have_text("long")


def test_tokens_are_coloured_and_the_row_is_what_will_be_trained(
    page: Page, served: Served
) -> None:
    """The last window of a 2,500-token row: sampled tokens stand out from context."""
    page.goto(f"{served.url}/ui/rollouts/long/rows?from=2490")
    colours = {
        kind: page.locator(f".tokens .{kind}").first.evaluate(
            "e => getComputedStyle(e).backgroundColor"
        )
        for kind in ("context", "trained")
    }
    assert colours["context"] != colours["trained"]
    expect(page.locator(".tokens .trained").first).to_have_attribute(
        "title", "position 2493, log-prob -0.1000"
    )
    expect(page.get_by_text("tokens 2490 to 2499 of 2500")).to_be_visible()


def test_hostile_text_does_not_run(page: Page, served: Served) -> None:
    """It is shown as the text that it is."""
    page.goto(f"{served.url}/ui/rollouts/evil/calls/c0")
    expect(page.locator("pre")).to_contain_text("<script>document.title=")
    page.wait_for_load_state("networkidle")
    assert "owned" not in page.title()


def test_live_pages_follow_without_losing_the_focus(page: Page, served: Served) -> None:
    """A call that comes while somebody looks appears by itself."""
    rollout = "watched"
    first = entry(rollout, "c0", "hello")
    asyncio.run_coroutine_threadsafe(served.store.put(first), served._loop).result(10)
    page.goto(f"{served.url}/ui/rollouts/{rollout}")
    page.locator("#live").check()
    page.locator("#c-c0").focus()
    intent = CallIntent(rollout_id=rollout, model_call_id="c1", request_digest="", created_at=1.0)
    asyncio.run_coroutine_threadsafe(served.store.open_intent(intent), served._loop).result(10)
    expect(page.get_by_text("1, 1 open")).to_be_visible()
    second = entry(rollout, "c1", "more", first)
    asyncio.run_coroutine_threadsafe(served.store.put(second), served._loop).result(10)
    expect(page.locator("#c-c1")).to_be_visible()
    expect(page.locator("#c-c0")).to_be_focused()


def test_nothing_comes_from_elsewhere(page: Page, served: Served) -> None:
    """Works offline: every request goes to the sidecar itself."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in ("/ui/rollouts", "/ui/rollouts/long", "/ui/health"):
        page.goto(f"{served.url}{path}")
    assert asked
    assert all(url.startswith(served.url) for url in asked)


def test_logging_in_with_the_control_token(page: Page) -> None:
    """A wrong token is said so; the right one opens the pages; logging out closes them."""
    with Served(TOKEN) as server:
        page.goto(f"{server.url}/ui/rollouts")
        page.get_by_label("Control token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("That is not the control token.")
        page.get_by_label("Control token").fill(TOKEN)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Rollouts")).to_be_visible()
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Control token")).to_be_visible()


def test_text_has_contrast_in_light_and_dark(chromium: Browser, served: Served) -> None:
    """At least 4.5 to 1 between text and page, for plain text, links and warnings."""
    for scheme in ("light", "dark"):
        context = chromium.new_context(color_scheme=scheme)  # type: ignore[arg-type]
        opened = context.new_page()
        opened.goto(f"{served.url}/ui/rollouts/long")
        paper = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        for name in ("--ink", "--link", "--bad", "--warn", "--good"):
            ink = opened.evaluate(
                "name => { const e = document.createElement('i'); e.style.color = `var(${name})`;"
                " document.body.append(e); return getComputedStyle(e).color; }",
                name,
            )
            assert contrast(ink, paper) >= 4.5, (scheme, name)
        context.close()


def contrast(one: str, other: str) -> float:
    """The WCAG ratio of two ``rgb(r, g, b)`` colours."""
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(p) / 255 for p in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_screenshots_for_the_eye(page: Page, served: Served, tmp_path: Path) -> None:
    """Every page renders to a picture that is not blank (kept in the test's directory)."""
    for name in (
        "rollouts",
        "rollouts/long",
        "rollouts/long/rows",
        "rollouts/evil/calls/c0",
        "health",
    ):
        page.goto(f"{served.url}/ui/{name}")
        picture = page.screenshot(path=tmp_path / f"{name.replace('/', '_')}.png")
        assert len(picture) > 10_000
