"""The dashboard's pages over real HTTP: who may look, what they say, and that they are safe."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pytest

from capture_server.stores.memory import MemoryCaptureStore
from capture_server.ui.session import SESSION_S, DashboardSessions
from capture_server.ui.tokens import WINDOW, drift_view, shade, token_window
from tests.http.capture_rig import CHAT, HELLO, Sidecar, sidecar
from tests.http.upstream import chat, scripted_engine, whole

HOSTILE = "</pre><script>alert(document.cookie)</script><img src=x onerror=alert(1)>"
TOKEN = "a-control-token-of-this-test"
ROLLOUT = "/rollouts/r1"
PAGES = ("", "/", "/rollouts", ROLLOUT, f"{ROLLOUT}/rows", f"{ROLLOUT}/calls/c1", "/health")


async def two_turns(car: Sidecar, first: str = "hi") -> None:
    """A root, and a call that continues it but drifts at position 2."""
    said: list[dict[str, Any]] = [*HELLO["messages"], {"role": "assistant", "content": first}]
    said.append({"role": "user", "content": "go on"})
    await car.http.post(CHAT, json=HELLO, headers={"x-model-call-id": "c1"})
    await car.http.post(CHAT, json={**HELLO, "messages": said}, headers={"x-model-call-id": "c2"})


def engine(first: str = "hi") -> Any:
    return scripted_engine(
        [whole(chat(first))], [whole(chat("more", ids=[21, 22], prompt=[1, 2, 99, 4]))]
    )


async def test_pages_show_the_rollout_its_calls_its_rows_and_the_drift() -> None:
    """Open and frozen: what is on each page is what the records say."""
    async with engine() as upstream, sidecar(upstream.url) as car:
        await two_turns(car)
        preview = (await car.http.get("/ui/rollouts/r1")).text
        await car.freeze()
        listed = (await car.http.get("/ui/rollouts")).text
        rollout = (await car.http.get("/ui/rollouts/r1")).text
        call = (await car.http.get("/ui/rollouts/r1/calls/c2")).text
        rows = (await car.http.get("/ui/rollouts/r1/rows")).text
        second_row = (await car.http.get("/ui/rollouts/r1/rows?row=1")).text
        health = (await car.http.get("/ui/health")).text

    assert "a preview of what is recorded so far" in preview
    assert 'href="/ui/rollouts/r1"' in listed
    assert "frozen" in listed
    for call_id in ("c1", "c2"):
        assert f'href="/ui/rollouts/r1/calls/{call_id}"' in rollout
    assert "drift at 2 of 4" in rollout
    assert "Drift at position 2" in call
    assert '<th scope="row">2</th><td class="n">11</td><td class="n">99</td>' in call
    assert "not proven by tokens" in call
    assert "As it will be trained" in rows
    assert {t for t in ("11", "12") if f">{t}</span>" in rows} == {"11", "12"}
    assert ">21</span>" in second_row
    assert "The store takes writes." in health


async def test_hostile_text_is_text_and_no_script_may_run() -> None:
    """Captured content is escaped, and the policy forbids inline scripts on every page."""
    async with engine(HOSTILE) as upstream, sidecar(upstream.url) as car:
        await two_turns(car, HOSTILE)
        answers = [await car.http.get(f"/ui{page}", follow_redirects=True) for page in PAGES]
        login = await car.http.get("/ui/login")
        missing = await car.http.get(f"/ui/rollouts/r1/calls/{HOSTILE.replace('/', '%2F')}")

    for answer in (*answers, login, missing):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "<script>" not in answer.text
        assert "onerror=alert(1)>" not in answer.text
        assert answer.headers["cache-control"] == "no-store"
    assert html.escape("<img src=x onerror=alert(1)>", quote=False) in answers[5].text.replace(
        "&#34;", '"'
    )


@pytest.mark.parametrize("page", PAGES)
async def test_a_page_is_not_shown_without_the_control_token(page: str) -> None:
    """Nobody sees a page without it; with it as a bearer token or by logging in, one does."""
    async with engine() as upstream, sidecar(upstream.url, control_token=TOKEN) as car:
        await two_turns(car)
        stranger = await car.http.get(f"/ui{page}")
        wrong = await car.http.get(f"/ui{page}", headers={"authorization": "Bearer no"})
        bearer = {"authorization": f"Bearer {TOKEN}"}
        shown = await car.http.get(f"/ui{page}", headers=bearer, follow_redirects=True)

    for answer in (stranger, wrong):
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login")
        assert "r1" not in answer.text
    assert shown.status_code == 200


async def test_logging_in_and_out() -> None:
    """The cookie opens pages, holds no token, is kept from scripts, and ends with log-out."""
    async with engine() as upstream, sidecar(upstream.url, control_token=TOKEN) as car:
        wrong = await car.http.post("/ui/login", data={"token": "nonsense"})
        right = await car.http.post("/ui/login", data={"token": TOKEN})
        shown = await car.http.get("/ui/rollouts")
        control = await car.http.get("/ng-rollout")
        out = await car.http.post("/ui/logout")
        after = await car.http.get("/ui/rollouts")

    assert wrong.status_code == 401
    assert "set-cookie" not in wrong.headers
    cookie = right.headers["set-cookie"].lower()
    assert TOKEN not in cookie
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/ui" in cookie
    assert shown.status_code == 200
    assert control.status_code == 401, "the cookie is good for pages only"
    assert out.status_code == 303
    assert after.status_code == 303


def sessions(now: float, *tokens: str) -> DashboardSessions:
    class Guard:
        needs_token = True

    return DashboardSessions(Guard(), tokens, clock=lambda: now)  # type: ignore[arg-type]


def test_a_session_ends_by_time_and_with_its_token() -> None:
    """Old, forged, cut and foreign cookies are refused; rotation keeps the other's sessions."""
    given = sessions(1000.0, "a", "b").open("a")
    assert given is not None
    valid = DashboardSessions._is_valid
    assert valid(sessions(1000.0, "b", "a"), given)
    assert not valid(sessions(1000.0, "b"), given)
    assert not valid(sessions(1000.0 + SESSION_S, "a"), given)
    until, _, mac = given.partition(".")
    later = f"{int(until) + 1}.{mac}"
    for forged in ("", ".", given[:-1], later, f"{until}.", "²." + mac, "\ud800.x"):
        assert not valid(sessions(1000.0, "a"), forged)
    assert sessions(1000.0, "a").open("c") is None


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/rollouts/nobody", 200),
        ("/rollouts/r1/calls/none", 404),
        ("/rollouts/r1/rows?row=7", 404),
        ("/rollouts/r1/rows?row=-1&from=x", 404),
        ("/rollouts/..%2e", 400),
        ("/rollouts?limit=9999999999999&sort=none&order=x&state=odd&cursor=%00", 200),
    ],
)
async def test_odd_questions_get_a_page(path: str, status: int) -> None:
    """Never a traceback."""
    async with engine() as upstream, sidecar(upstream.url) as car:
        await two_turns(car)
        answer = await car.http.get(f"/ui{path}")
    assert answer.status_code == status
    assert "<h1>" in answer.text


async def test_a_store_that_is_down_is_said_on_the_page() -> None:
    """Health and list say why."""
    store = MemoryCaptureStore()
    async with engine() as upstream, sidecar(upstream.url, store=store) as car:
        await two_turns(car)

        async def broken(*_: object, **__: object) -> str:
            return "no space left on the device"

        store.healthy = broken  # type: ignore[method-assign]
        health = (await car.http.get("/ui/health")).text
    assert "takes no writes: no space left on the device" in health


async def test_sorting_filtering_and_paging() -> None:
    """A page of the listing, sorted within itself, with links that keep the question."""
    answers = [[whole(chat(ids=list(range(n + 1))))] for n in range(3)]
    async with scripted_engine(*answers) as upstream, sidecar(upstream.url) as car:
        for name in ("aa", "ab", "b"):
            await car.http.post(CHAT.replace("/r1/", f"/{name}/"), json=HELLO)
        most = (await car.http.get("/ui/rollouts?sort=tokens&order=desc")).text
        some = (await car.http.get("/ui/rollouts?prefix=a")).text

    assert [most.index(f'id="r-{name}"') for name in ("b", "ab", "aa")] == sorted(
        most.index(f'id="r-{name}"') for name in ("b", "ab", "aa")
    )
    assert 'id="r-b"' not in some
    assert "prefix=a&amp;" in some


def test_a_long_sequence_is_shown_in_pieces() -> None:
    """Windows join without gap, and only sampled tokens are coloured."""
    total = 2 * WINDOW + 5
    mask = np.zeros(total, dtype=np.uint8)
    mask[WINDOW - 1 : WINDOW + 1] = 1
    log_probs = np.where(mask == 1, -0.75, 0.0)
    sampled = [(WINDOW - 1, WINDOW + 2, "c")]
    seen: list[int] = []
    start: int | None = 0
    while start is not None:
        window = token_window(np.arange(total), mask, log_probs, sampled, start)
        seen += [cell.token_id for cell in window.cells]
        start = window.after
    assert seen == list(range(total))
    window = token_window(np.arange(total), mask, log_probs, sampled, WINDOW)
    assert [cell.kind for cell in window.cells[:3]] == ["trained", "elsewhere", "context"]
    assert window.cells[0].log_prob == -0.75
    assert window.before == 0


def test_shades_grow_as_a_token_gets_unlikely() -> None:
    """Eight steps from certain to e^-8 and below."""
    values = [0.0, -0.1, -0.3, -0.7, -1.5, -3.0, -6.0, -20.0]
    assert [shade(value) for value in values] == list(range(8))


def test_drift_at_the_end_of_one_sequence_says_end() -> None:
    """The prompt is shorter than what its parent had."""
    view = drift_view(np.array([1, 2, 3]), np.array([1, 2]), 2)
    assert view.rows == [(0, 1, 1), (1, 2, 2), (2, 3, None)]
