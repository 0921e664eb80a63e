"""middleware.paths and middleware.routes: the tagged URL's grammar and the routing table."""

from __future__ import annotations

import pytest

from middleware.errors import InvalidIdError
from middleware.paths import (
    capture_base_url,
    parse_tagged_path,
    validate_call_id,
    validate_rollout_id,
)
from middleware.routes import Kind, classify

R = b"/ng-rollout/r1/training-token-capture"


@pytest.mark.parametrize(
    "bad",
    ["", "..", "../x", "a/b", "%2e%2e%2fx", "a\x00b", "a\n", ".hidden", "-a", "é", "é", "x" * 201]
    + ["a b", "a~b", "a:b", None, 7],
)
def test_hostile_ids_are_refused_by_the_one_validator(bad: str) -> None:
    """C36: refused before they can touch a path, a query or a header."""
    with pytest.raises(InvalidIdError) as caught:
        validate_rollout_id(bad)
    assert caught.value.code == "invalid_rollout_id"
    with pytest.raises(InvalidIdError) as caught:
        validate_call_id(bad)
    assert caught.value.code == "invalid_call_id"


def test_valid_ids_pass() -> None:
    """The whole alphabet, both length limits, names that are special elsewhere."""
    for good in ("a", "7", "x" * 200, "A1", "a1", "CON", "r1.tokens", "a_b-c.9"):
        assert validate_rollout_id(good) == good


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        (R + b"/v1/x", b"", (b"", "r1", True, b"/v1/x")),
        (b"/gw" + R + b"/v1/x", b"/gw", (b"/gw", "r1", True, b"/v1/x")),
        (R + b"/v1/x", b"/gw", (b"", "r1", True, b"/v1/x")),
        (R, b"", (b"", "r1", True, b"")),
        (R + b"/", b"", (b"", "r1", True, b"/")),
        (b"/ng-rollout/r%31/training-token-capture/v1", b"", (b"", "r1", True, b"/v1")),
        (b"//ng-rollout/r1//training-token-capture//v1", b"", (b"", "r1", True, b"//v1")),
        (b"/ng-rollout/r1/v1/models", b"", (b"", "r1", False, b"/v1/models")),
        (b"/ng-rollout/r1", b"", (b"", "r1", False, b"")),
        (b"/ng-rollout/r1/training-token-captureX/v1", b"", None),
    ],
)
def test_tagged_paths(path: bytes, root: bytes, expected: tuple[object, ...] | None) -> None:
    """C37: at the root, behind a root path (repeated or not), encoded, with doubled slashes."""
    tagged = parse_tagged_path(path, root)

    if expected is None:
        expected = (b"", "r1", False, b"/training-token-captureX/v1")
    assert tagged is not None
    assert (tagged.prefix, tagged.rollout_id, tagged.captured, tagged.rest) == expected


@pytest.mark.parametrize(
    "path",
    [
        b"/",
        b"/v1/models",
        b"/ng-rolloutX/r1/v1",
        b"/ng-rollout",
        b"/ng-rollout/",
        b"/x/ng-rollout/r1/v1",
    ],
)
def test_look_alikes_are_not_tagged(path: bytes) -> None:
    """Segment borders, not string prefixes."""
    assert parse_tagged_path(path) is None


@pytest.mark.parametrize(
    "segment",
    [b"..", b"%2e%2e%2fx", b"%252e", b"a%00b", b"a%0a", b"%C3%A9", b"/training-token-capture/v1"],
)
def test_a_tagged_path_with_a_bad_id_is_an_error_not_a_pass(segment: bytes) -> None:
    """It must never be forwarded untagged."""
    with pytest.raises(InvalidIdError):
        parse_tagged_path(b"/ng-rollout/" + segment)


def test_urls_are_built_from_valid_ids_only() -> None:
    """What an agent is given."""
    assert capture_base_url("http://h:1/", "r1") == f"http://h:1{R.decode()}/v1"
    with pytest.raises(InvalidIdError):
        capture_base_url("http://h", "a/b")


@pytest.mark.parametrize(
    ("method", "rest", "kind", "engine_path"),
    [
        ("POST", "/v1/chat/completions", Kind.CAPTURED, "/v1/chat/completions"),
        ("POST", "/chat/completions", Kind.CAPTURED, "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", Kind.CAPTURED, "/v1/chat/completions"),
        ("POST", "/v1//chat/completions/", Kind.CAPTURED, "/v1/chat/completions"),
        ("POST", "//v1/completions", Kind.CAPTURED, "/v1/completions"),
        ("GET", "/models", Kind.FORWARD, "/v1/models"),
        ("GET", "/v1/models/x", Kind.FORWARD, "/v1/models/x"),
        ("GET", "/v1/a%2Fb//c", Kind.FORWARD, "/v1/a%2Fb//c"),
        ("OPTIONS", "/v1/chat/completions", Kind.FORWARD, "/v1/chat/completions"),
        ("POST", "/tokenize", Kind.FORWARD, "/tokenize"),
        ("POST", "/v1/messages/count_tokens", Kind.FORWARD, "/v1/messages/count_tokens"),
        ("POST", "/api/event_logging/batch", Kind.FORWARD, "/api/event_logging/batch"),
        ("POST", "/v1/audio/speech", Kind.UNOBSERVED, "/v1/audio/speech"),
        ("PUT", "/v1/chat/completions", Kind.UNOBSERVED, "/v1/chat/completions"),
        ("PATCH", "/api/x", Kind.UNOBSERVED, "/api/x"),
        ("DELETE", "/v1/responses/r", Kind.DELETE, "/v1/responses/r"),
        ("HEAD", "/anything", Kind.HEAD, ""),
        ("HEAD", "", Kind.HEAD, ""),
        ("GET", "", Kind.CONTROL, ""),
        ("GET", "//snapshot/", Kind.CONTROL, "/snapshot"),
        ("DELETE", "", Kind.CONTROL, ""),
        ("POST", "/freeze", Kind.CONTROL, "/freeze"),
        ("GET", "/freeze", Kind.CONTROL, "/freeze"),
        ("POST", "/freezer", Kind.UNKNOWN, ""),
        ("GET", "/v2/models", Kind.UNKNOWN, ""),
    ],
)
def test_the_routing_table(method: str, rest: str, kind: Kind, engine_path: str) -> None:
    """Spec 05, "Model traffic"; C39: every way in which clients join base URLs."""
    route = classify(method, rest.encode())

    assert (route.kind, route.raw_path.decode()) == (kind, engine_path)
