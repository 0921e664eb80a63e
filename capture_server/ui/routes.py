"""The pages' routes: who may look, what is read, which template shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable
from urllib.parse import parse_qs, quote

import anyio
import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from capture_server.auth import ControlGuard
from capture_server.config import Settings
from capture_server.errors import UnauthorizedError
from capture_server.stores.statistics import CountingStore, spill_usage
from capture_server.ui.session import COOKIE, SESSION_S, DashboardSessions
from capture_server.ui.views import call_view, row_view, tree_of
from middleware._version import __version__
from middleware.capture import capture_health_snapshot
from middleware.errors import InvalidIdError, StoreError
from middleware.paths import validate_rollout_id
from middleware.protocols import CaptureStore, RolloutStatus, TokenCaptureSnapshot
from middleware.records import TokenEntry

_HERE: Final = Path(__file__).parent
_MAX_FORM: Final = 4096  # bytes of the login form
_THREADS: Final = 2  # pages being built at once; they must not take the processor from calls
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_LIMITS: Final = (100, 250, 1000)
_SORTS: Final[Mapping[str, Callable[[RolloutStatus], Any]]] = {
    "id": lambda row: row.rollout_id,
    "state": lambda row: row.state,
    "calls": lambda row: row.calls,
    "tokens": lambda row: row.generated_tokens,
    "open": lambda row: len(row.open_intents),
    "incomplete": lambda row: row.incomplete,
    "drift": lambda row: row.drifted_calls,
    "last": lambda row: row.last_call_at or 0.0,
}

T = TypeVar("T")


@runtime_checkable
class LiveStore(Protocol):
    """A store that can show the records of a rollout before its freeze. Blocking."""

    def read_entries(self, rollout_id: str) -> list[TokenEntry]:
        """All records so far."""


def install_dashboard(
    app: FastAPI, store: CaptureStore, settings: Settings, running_calls: Callable[[], int]
) -> None:
    """Serve the pages of ``store`` below ``/ui``, behind the control token."""
    dashboard = _Dashboard(store, settings, running_calls)
    app.include_router(dashboard.router())
    app.mount("/ui/static", StaticFiles(directory=_HERE / "static"), name="ui-static")
    # Last: what no page has must not be passed on to the engine.
    app.include_router(dashboard.rest())


class _Dashboard:
    def __init__(
        self, store: CaptureStore, settings: Settings, running_calls: Callable[[], int]
    ) -> None:
        self._store = store
        self._settings = settings
        self._running_calls = running_calls
        self._sessions = DashboardSessions(ControlGuard(settings), settings.control_tokens)
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._templates = Environment(
            loader=PackageLoader("capture_server.ui"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"ago": _ago, "segment": lambda text: quote(text, safe="")}

    def router(self) -> APIRouter:
        """All pages; none of them stands in the API's document."""
        router = APIRouter(prefix="/ui", include_in_schema=False)
        pages: dict[str, Callable[..., Any]] = {
            "": self._home,
            "/": self._home,
            "/rollouts": self._rollouts,
            "/rollouts/{rollout_id}": self._rollout,
            "/rollouts/{rollout_id}/calls/{call_id}": self._call,
            "/rollouts/{rollout_id}/rows": self._row,
            "/health": self._health,
        }
        for path, page in pages.items():
            router.add_api_route(path, self._guarded(page), methods=["GET"])
        router.add_api_route("/login", self._login_form, methods=["GET"])
        router.add_api_route("/login", self._login, methods=["POST"])
        router.add_api_route("/logout", self._logout, methods=["POST"])
        return router

    def rest(self) -> APIRouter:
        """Every other path below ``/ui``."""

        async def missing(request: Request) -> Response:
            return self._message(request, 404, "there is no such page")

        router = APIRouter(prefix="/ui", include_in_schema=False)
        router.add_api_route("/{path:path}", self._guarded(missing), methods=["GET"])
        return router

    # --- who may look ------------------------------------------------------------------------

    def _guarded(self, page: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def guarded(request: Request) -> Response:
            try:
                if not self._sessions.allows(request):
                    return _redirect(request, "/login")
                shown: Response = await page(request)
            except UnauthorizedError as error:
                return self._message(request, 401, str(error))
            except InvalidIdError as error:
                return self._message(request, 400, str(error))
            except StoreError as error:
                return self._message(request, 503, str(error))
            return shown

        return guarded

    async def _login_form(self, request: Request) -> Response:
        return self._page(request, "login.html", failed=False)

    async def _login(self, request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_FORM:
                return self._message(request, 413, "the form is too large")
        form = parse_qs(body.decode("utf-8", "replace"))
        cookie = self._sessions.open(form.get("token", [""])[0])
        if cookie is None:
            return self._page(request, "login.html", status=401, failed=True)
        response = _redirect(request, "/rollouts")
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_S,
            path=f"{_root(request)}/ui",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response

    async def _logout(self, request: Request) -> Response:
        response = _redirect(request, "/login")
        response.delete_cookie(COOKIE, path=f"{_root(request)}/ui")
        return response

    # --- pages -------------------------------------------------------------------------------

    async def _home(self, request: Request) -> Response:
        return _redirect(request, "/rollouts")

    async def _rollouts(self, request: Request) -> Response:
        query = request.query_params
        state = query.get("state", "")
        limit = _number(query.get("limit"), _LIMITS[0])
        limit = limit if limit in _LIMITS else _LIMITS[0]
        rows, next_cursor = await self._store.list_rollouts(
            state=state if state in ("open", "frozen", "retired") else None,
            prefix=query.get("prefix", ""),
            limit=limit,
            cursor=query.get("cursor", ""),
        )
        sort = query.get("sort", "id")
        sort = sort if sort in _SORTS else "id"
        descending = query.get("order") == "desc"
        return self._page(
            request,
            "rollouts.html",
            rows=sorted(rows, key=_SORTS[sort], reverse=descending),
            next_cursor=next_cursor,
            asked={
                "state": state,
                "prefix": query.get("prefix", ""),
                "limit": limit,
                "cursor": query.get("cursor", ""),
            },
            limits=_LIMITS,
            sort=sort,
            descending=descending,
        )

    async def _rollout(self, request: Request) -> Response:
        status, snapshot = await self._read(request)
        tree = None if snapshot is None else await self._threaded(lambda: tree_of(snapshot))
        return self._page(request, "rollout.html", status=status, tree=tree)

    async def _call(self, request: Request) -> Response:
        status, snapshot = await self._read(request)
        call_id = request.path_params["call_id"]
        given = request.query_params.get("from")
        start = None if given is None else _number(given, 0)
        view = (
            None
            if snapshot is None
            else await self._threaded(lambda: call_view(snapshot, call_id, start))
        )
        if view is None:
            return self._message(request, 404, "no such call is recorded, or not readable yet")
        return self._page(request, "call.html", status=status, view=view)

    async def _row(self, request: Request) -> Response:
        status, snapshot = await self._read(request)
        query = request.query_params
        index = None if "row" not in query else _number(query["row"], -1)
        start = _number(query.get("from"), 0)
        view = (
            None
            if snapshot is None
            else await self._threaded(lambda: row_view(snapshot, index, start))
        )
        if view is None:
            return self._message(request, 404, "this rollout has no such row")
        return self._page(request, "row.html", status=status, view=view)

    async def _health(self, request: Request) -> Response:
        store = self._store
        spilled, spilled_bytes = spill_usage(store)
        statistics = store.statistics() if isinstance(store, CountingStore) else None
        counts = [] if statistics is None else [
            (name.replace("_", " "), getattr(statistics, name))
            for name in statistics.__dataclass_fields__
            if name != "on_sync"
        ]  # fmt: skip
        return self._page(
            request,
            "health.html",
            reason=await store.healthy(),
            running=self._running_calls(),
            capture=capture_health_snapshot(),
            counts=counts,
            spill=(spilled, spilled_bytes),
            settings=self._settings.effective(),
        )

    async def _read(self, request: Request) -> tuple[RolloutStatus, TokenCaptureSnapshot | None]:
        """The status, and the records: the snapshot, or of an open rollout what is there now."""
        rollout_id = request.path_params["rollout_id"]
        validate_rollout_id(rollout_id)
        store = self._store
        status = await store.status(rollout_id)
        if status.state == "frozen":
            return status, await store.snapshot(rollout_id)
        if status.state != "open" or not isinstance(store, LiveStore):
            return status, None
        entries = await self._threaded(lambda: store.read_entries(rollout_id))
        preview = TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=entries,
            incomplete=status.incomplete,
            snapshot_id="",
            version=status.version,
            incomplete_reasons=status.incomplete_reasons,
        )
        return status, preview

    async def _threaded(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    # --- rendering ---------------------------------------------------------------------------

    def _page(
        self, request: Request, template: str, *, status: Any = None, **values: Any
    ) -> HTMLResponse:
        code = status if isinstance(status, int) else 200
        html = self._templates.get_template(template).render(
            base=f"{_root(request)}/ui",
            version=__version__,
            may_log_out=COOKIE in request.cookies,
            status=status,
            **values,
        )
        return HTMLResponse(html, code, headers=_HEADERS)

    def _message(self, request: Request, code: int, message: str) -> HTMLResponse:
        return self._page(request, "message.html", status=code, message=message)


def _root(request: Request) -> str:
    root: str = request.scope.get("root_path", "").rstrip("/")
    return root


def _redirect(request: Request, page: str) -> RedirectResponse:
    return RedirectResponse(f"{_root(request)}/ui{page}", 303, headers=_HEADERS)


def _number(text: str | None, default: int) -> int:
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number and text is not None else default


def _ago(at: float | None) -> str:
    """How long ago, in the largest fitting unit."""
    if at is None:
        return ""
    seconds = max(0.0, time.time() - at)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
