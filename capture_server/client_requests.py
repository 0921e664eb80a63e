"""The client's side of the control API without I/O: requests to send, answers to parse.

Both clients (``capture_server.client``) only move bytes; paths, bodies, parsing, error mapping
and the retry decision are here, once. Every call is idempotent by the API's contract, which is
why all may be sent again after a lost answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Generic, TypeVar

import orjson

from capture_server.client_models import BuiltResponse, RolloutPage, traces_of
from capture_server.errors import SidecarResponseError, error_from_body
from capture_server.snapshot_body import parse_ndjson
from capture_server.trajectories.rows import RolloutTraces
from middleware.errors import TokenCaptureError
from middleware.paths import CAPTURE_SEGMENT, ROLLOUT_SEGMENT, validate_rollout_id
from middleware.protocols import IncompleteReason, RolloutStatus, TokenCaptureSnapshot

T = TypeVar("T")

_LISTING: Final = f"/{ROLLOUT_SEGMENT}"
_MAX_BACKOFF_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete HTTP answer, content coding already undone."""

    status: int
    headers: Mapping[str, str]  # case-insensitive
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request and how to read its answer."""

    method: str
    path: str
    parse: Callable[[Any], T]  # gets the JSON value, or the bytes where ``raw``
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None  # JSON value; None: no body
    accept: str = "application/json"
    raw: bool = False

    @property
    def content(self) -> bytes | None:
        """The request body."""
        return None if self.body is None else orjson.dumps(self.body)

    @property
    def headers(self) -> dict[str, str]:
        """Request headers, without the token."""
        kind = {} if self.body is None else {"content-type": "application/json"}
        # Token arrays over a local link: compressing costs more than it saves.
        return {"accept": self.accept, "accept-encoding": "identity", **kind}

    def read(self, answer: Answer) -> T:
        """The typed result.

        Raises:
            TokenCaptureError: the error that the server answered, as its own class.
        """
        where = f"{self.method} {self.path}"
        if answer.status != 200:
            raise error_from_body(answer.status, _json_or_none(answer.body), fallback=where)
        try:
            return self.parse(answer.body if self.raw else orjson.loads(answer.body))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise SidecarResponseError(
                f"{where}: the answer is not what this client understands ({exc})",
                status=answer.status,
            ) from exc


def retry_delays(retries: int, *, base_s: float = 0.1) -> Iterator[float]:
    """Waits between attempts: doubling, with jitter so that many trainers spread out."""
    for attempt in range(retries):
        yield min(base_s * 2**attempt, _MAX_BACKOFF_S) * random.uniform(0.5, 1.0)  # noqa: S311


def wait_before_retry(answer: Answer, delay_s: float) -> float | None:
    """How long to wait before the same request is sent again; None: this answer is final."""
    if answer.status != 503:
        return None
    try:
        asked_s = float(answer.headers.get("retry-after", "0"))
    except ValueError:
        asked_s = 0.0
    return min(max(delay_s, asked_s), _MAX_BACKOFF_S)


def _json_or_none(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _path(rollout_id: str, verb: str = "") -> str:
    validate_rollout_id(rollout_id)
    path = f"/{ROLLOUT_SEGMENT}/{rollout_id}/{CAPTURE_SEGMENT}"
    return f"{path}/{verb}" if verb else path


# --- calls -------------------------------------------------------------------------------------


def ready() -> Call[str]:
    """Whether the sidecar can capture calls."""
    return Call(method="GET", path="/readyz", parse=lambda body: str(body["status"]))


def version() -> Call[dict[str, Any]]:
    """Release and record formats."""
    return Call(method="GET", path="/version", parse=dict)


def status(rollout_id: str) -> Call[RolloutStatus]:
    """Counts and state."""
    return Call(method="GET", path=_path(rollout_id), parse=parse_status)


def freeze(rollout_id: str) -> Call[RolloutStatus]:
    """Fence and fix the snapshot."""
    return Call(method="POST", path=_path(rollout_id, "freeze"), parse=parse_status)


def snapshot(rollout_id: str, *, full_prompts: bool) -> Call[TokenCaptureSnapshot]:
    """The entries of a frozen rollout."""
    return Call(
        method="GET",
        path=_path(rollout_id, "snapshot"),
        query={"full_prompts": "true"} if full_prompts else {},
        accept="application/x-ndjson",
        raw=True,
        parse=parse_snapshot,
    )


def snapshot_ndjson(rollout_id: str, *, full_prompts: bool) -> Call[bytes]:
    """The same as it came over the wire, checked."""
    call = snapshot(rollout_id, full_prompts=full_prompts)
    return Call(
        method=call.method,
        path=call.path,
        query=call.query,
        accept=call.accept,
        raw=True,
        parse=_checked_ndjson,
    )


def _checked_ndjson(data: bytes) -> bytes:
    parse_ndjson(data)
    return data


def trajectories(rollout_id: str, **options: Any) -> Call[BuiltResponse]:
    """Build one response (format ``responses``)."""
    return _build(rollout_id, "responses", options, BuiltResponse.of)


def traces(rollout_id: str, **options: Any) -> Call[RolloutTraces]:
    """Build training rows (format ``traces``)."""
    return _build(rollout_id, "traces", options, traces_of)


def _build(
    rollout_id: str, form: str, options: Mapping[str, Any], parse: Callable[[Any], T]
) -> Call[T]:
    given = {name: value for name, value in options.items() if value is not None}
    return Call(
        method="POST",
        path=_path(rollout_id, "trajectories"),
        body={"format": form, **given},
        parse=parse,
    )


def retire(rollout_id: str, *, snapshot_id: str, version: int) -> Call[bool]:
    """Remove exactly the consumed snapshot."""
    return Call(
        method="POST",
        path=_path(rollout_id, "retire"),
        body={"snapshot_id": snapshot_id, "version": version},
        parse=lambda body: bool(body["retired"]),
    )


def delete(rollout_id: str) -> Call[bool]:
    """Clear unconditionally."""
    return Call(method="DELETE", path=_path(rollout_id), parse=lambda body: bool(body["deleted"]))


def list_rollouts(*, state: str | None, prefix: str, limit: int, cursor: str) -> Call[RolloutPage]:
    """One page of rollouts."""
    query = {"state": state or "", "prefix": prefix, "limit": str(limit), "cursor": cursor}
    return Call(
        method="GET",
        path=_LISTING,
        query={name: value for name, value in query.items() if value},
        parse=lambda body: RolloutPage(
            rollouts=tuple(parse_status(row) for row in body["rollouts"]),
            next_cursor=body["next_cursor"],
        ),
    )


def freeze_many(rollout_ids: Iterable[str]) -> Call[dict[str, RolloutStatus | TokenCaptureError]]:
    """Freeze each; a result or an error per id."""
    return _batch("freeze", rollout_ids, parse_status)


def delete_many(rollout_ids: Iterable[str]) -> Call[dict[str, bool | TokenCaptureError]]:
    """Clear each."""
    return _batch("delete", rollout_ids, lambda body: bool(body["deleted"]))


def retire_many(
    consumed: Mapping[str, tuple[str, int]],
) -> Call[dict[str, bool | TokenCaptureError]]:
    """Retire each at the (snapshot id, version) that was consumed."""
    snapshots = {
        rollout_id: {"snapshot_id": snapshot_id, "version": version}
        for rollout_id, (snapshot_id, version) in consumed.items()
    }
    return _batch("retire", consumed, lambda body: bool(body["retired"]), snapshots=snapshots)


def _batch(
    op: str, rollout_ids: Iterable[str], parse: Callable[[Any], T], **more: Any
) -> Call[dict[str, T | TokenCaptureError]]:
    def parse_results(body: Any) -> dict[str, T | TokenCaptureError]:
        return {
            rollout_id: error_from_body(0, result, fallback=f"{op} {rollout_id}")
            if "error" in result
            else parse(result)
            for rollout_id, result in body["results"].items()
        }

    return Call(
        method="POST",
        path=f"{_LISTING}:batch",
        body={"op": op, "ids": list(rollout_ids), **more},
        parse=parse_results,
    )


def sweep(*, older_than_seconds: float) -> Call[int]:
    """Remove old tombstones."""
    return Call(
        method="POST",
        path=f"{_LISTING}:sweep",
        body={"older_than_seconds": older_than_seconds},
        parse=lambda body: int(body["removed"]),
    )


# --- answers -----------------------------------------------------------------------------------

_STATUS_FIELDS: Final = frozenset(field.name for field in fields(RolloutStatus))


def parse_status(body: Any) -> RolloutStatus:
    """A status row; keys of newer servers are left out."""
    known = {name: value for name, value in body.items() if name in _STATUS_FIELDS}
    known["incomplete_reasons"] = parse_reasons(known.get("incomplete_reasons", ()))
    known["drifted"] = tuple(known.get("drifted", ()))
    known["open_intents"] = tuple(known.get("open_intents", ()))
    return RolloutStatus(**known)


def parse_reasons(rows: Iterable[Mapping[str, Any]]) -> tuple[IncompleteReason, ...]:
    """The causes for which a rollout must be masked."""
    return tuple(
        IncompleteReason(
            code=row["code"],
            model_call_id=row.get("model_call_id", ""),
            detail=row.get("detail", ""),
            at=row.get("at", 0.0),
        )
        for row in rows
    )


def parse_snapshot(data: bytes) -> TokenCaptureSnapshot:
    """A snapshot from its NDJSON form."""
    header, entries = parse_ndjson(data)
    return TokenCaptureSnapshot(
        rollout_id=header["rollout_id"],
        entries=tuple(entries),
        incomplete=header["incomplete"],
        snapshot_id=header["snapshot_id"],
        version=header["version"],
        incomplete_reasons=parse_reasons(header["incomplete_reasons"]),
    )
