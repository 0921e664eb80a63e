"""A TCP proxy in front of a PostgreSQL server that loses answers on demand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

from psycopg.conninfo import conninfo_to_dict

_READY = b"Z\x00\x00\x00\x05I"  # ReadyForQuery, idle: what was asked is committed


class DroppingProxy:
    """``drop(n)``: the next ``n`` answers to an append are lost, with their connections."""

    def __init__(self, database_url: str) -> None:
        self._to = conninfo_to_dict(database_url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        # The session's unix socket directory stands in the query.
        parts = urlsplit(database_url)
        user = str(self._to.get("user") or "postgres")
        self.url = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{port}", query=""))
        self.dropped = 0
        self._left = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def drop(self, times: int) -> None:
        """Lose the next answers."""
        self._left = times

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _connect(self) -> socket.socket:
        host, port = str(self._to.get("host") or "127.0.0.1"), str(self._to.get("port") or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, int(port)))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _serve(self, client: socket.socket) -> None:
        server = self._connect()
        asked = threading.Event()
        back = threading.Thread(target=self._answers, args=(server, client, asked), daemon=True)
        back.start()
        with suppress(OSError):
            while data := client.recv(65536):
                if b"append_v1" in data or asked.is_set():
                    asked.set()  # prepared later on: then every request of this connection counts
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        back.join()
        server.close()
        client.close()

    def _answers(
        self, server: socket.socket, client: socket.socket, asked: threading.Event
    ) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if self._left and asked.is_set() and data.endswith(_READY):
                    self._left -= 1
                    self.dropped += 1
                    break
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def dropping_proxy(database_url: str) -> Iterator[DroppingProxy]:
    """One for the time of a test."""
    proxy = DroppingProxy(database_url)
    try:
        yield proxy
    finally:
        proxy.close()
