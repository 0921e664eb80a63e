"""Choosing a representation: ``Accept``, ``Accept-Encoding`` and ``If-None-Match``.

Pure functions on header values. Source: RFC 9110, sections 12.5 and 13.1.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def preferred_type(accept: str, offers: Sequence[str]) -> str | None:
    """The offer that the client likes best, the first of equals; None when it accepts none.

    An empty header accepts everything.
    """
    if not accept.strip():
        return offers[0]
    ranges = dict(_weighted(accept))
    ranked = [(_quality_of(offer, ranges), -rank, offer) for rank, offer in enumerate(offers)]
    quality, _, best = max(ranked)
    return best if quality > 0 else None


def preferred_encoding(accept_encoding: str, offers: Sequence[str]) -> str | None:
    """The content coding to use, or None for the plain body: the server's order among those
    that the client weighs above zero.
    """
    wanted = dict(_weighted(accept_encoding))
    for offer in offers:
        if wanted.get(offer, wanted.get("*", 0.0)) > 0:
            return offer
    return None


def etag_matches(if_none_match: str, etag: str) -> bool:
    """Whether a list of entity tags (or ``*``) holds this one, compared weakly."""
    if if_none_match.strip() == "*":
        return True
    tags = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
    return etag in tags


def _weighted(header: str) -> Iterator[tuple[str, float]]:
    for item in header.split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        if not name:
            continue
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
        yield name, quality


def _quality_of(offer: str, ranges: dict[str, float]) -> float:
    """The most specific range that covers the offer decides."""
    kind = offer.partition("/")[0]
    for name in (offer, f"{kind}/*", "*/*"):
        if name in ranges:
            return ranges[name]
    return 0.0
