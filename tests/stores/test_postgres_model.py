"""The PostgreSQL store against a dictionary: the file store's model, over two stores on one
database."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from capture_server.stores.postgres import PostgresCaptureStore
from tests.stores.postgres_server import query
from tests.stores.test_model import STORES, Model, StoreMachine


class PostgresMachine(StoreMachine):
    """Two stores on one database take turns; both must always agree with the model."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    @initialize()
    def open_stores(self) -> None:
        query(self.url, "DELETE FROM token_capture_rollouts")
        query(self.url, "DELETE FROM token_capture_records")
        self.stores = [self.opened() for _ in "ab"]
        self.models: dict[str, Model] = {}

    def opened(self) -> PostgresCaptureStore:
        return PostgresCaptureStore(f"{self.url}{'&' if '?' in self.url else '?'}max_connections=1")

    @rule(which=STORES)
    def reopen(self, which: int) -> None:
        self.stores[which].close_now()
        self.stores[which] = self.opened()


def test_any_order_of_operations(database):
    """Whatever two nodes do in turn, they and the model agree."""
    run_state_machine_as_test(
        lambda: PostgresMachine(database),
        settings=settings(max_examples=15, stateful_step_count=30, deadline=None),
    )
