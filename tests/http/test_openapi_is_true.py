"""The OpenAPI document says what the control routes really take and answer (schemathesis)."""

from __future__ import annotations

from typing import Any

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings

from capture_server.config import load_settings
from capture_server.control_routes import install_control_routes
from capture_server.store_rpc import install_store_rpc
from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.registry import open_resolver


def application() -> FastAPI:
    """All control routes over one store; what a generated request left stays for the next."""
    store = MemoryCaptureStore()
    app = FastAPI(redirect_slashes=False)
    config = load_settings(freeze_grace_s=0)
    install_store_rpc(app, store, open_resolver("memory:", store), config)
    install_control_routes(app, store, config)
    return app


schema = schemathesis.openapi.from_asgi("/openapi.json", application())


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_requests_and_answers_are_as_documented(case: Any) -> None:
    """Documented requests get documented answers; undocumented ones are refused, never a 500."""
    case.call_and_validate()
