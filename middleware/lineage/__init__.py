"""Lineage: which recorded call does this request continue?

``matching`` decides, ``tokens`` shares cumulative sequences, ``index`` and ``memory`` are the
single worker's resolver, ``incremental`` is the base of resolvers over a backend, ``ledger`` the
token-free rows of external staging. Source: spec 02.
"""

from middleware.lineage.incremental import CursorReset, DeliveryNote, IncrementalLineageStore
from middleware.lineage.index import LineageIndex
from middleware.lineage.ledger import LedgerRows
from middleware.lineage.matching import (
    AMBIGUOUS,
    LOOKUP_ERROR,
    NO_MATCH,
    PROMPT_CONFIG_CHANGED,
    LineageNode,
    RolloutLineage,
    hash_request,
    resolution,
    stamp_continuation,
)
from middleware.lineage.memory import InMemoryLineageStore
from middleware.lineage.tokens import SharedTokens

__all__ = [
    "AMBIGUOUS",
    "LOOKUP_ERROR",
    "NO_MATCH",
    "PROMPT_CONFIG_CHANGED",
    "CursorReset",
    "DeliveryNote",
    "InMemoryLineageStore",
    "IncrementalLineageStore",
    "LedgerRows",
    "LineageIndex",
    "LineageNode",
    "RolloutLineage",
    "SharedTokens",
    "hash_request",
    "resolution",
    "stamp_continuation",
]
