"""The server process: its socket, its signals, and its shutdown."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import uvicorn

from specjax import signals
from specjax.apps.serve.app import Api, build_app
from specjax.apps.serve.connections import Completions
from specjax.apps.serve.engine_thread import EngineThread
from specjax.apps.serve.playground_api import Playground
from specjax.apps.serve.requests import RequestReader
from specjax.apps.serve.serve_config import ServeConfig
from specjax.engine.engine import Engine
from specjax.errors import InputError

_UNREAD_S = 30
"""Seconds after which a connection ends whose client does not read what was sent."""
_ABORTING_S = 5
"""Seconds for the responses of aborted requests."""
_MOST_CONNECTIONS = 900
"""Fewer than the files that a process may open by default."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to `host` and `port`. Raises InputError if that is impossible."""
    listener = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The connections inherit it. A response that is never read would stay open for ever.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise InputError(
            f"host={host!r}, port={port}: cannot listen there ({error.strerror}); use another "
            "port, or 0 for a free one"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A server for an engine, on a bound socket.

    A request to stop ends it once the running requests have finished; they are aborted after
    `shutdown_s` seconds. `ready` is called once it listens.
    """

    def __init__(
        self,
        engine: Engine,
        options: ServeConfig,
        listener: socket.socket,
        *,
        api_key: str | None = None,
        ready: Callable[[], None],
    ) -> None:
        self._engine = EngineThread(engine, options.max_waiting)
        self._listener, self._shutdown_s, self._ready = listener, options.shutdown_s, ready
        reader = RequestReader(engine, options.model_name, options.sampling, self._engine.capacity)
        completions = Completions(self._engine, reader, options.max_body_bytes)
        config = uvicorn.Config(
            build_app(Api(completions), Playground(completions), options.host, api_key),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=int(options.shutdown_s) + _ABORTING_S,
        )
        super().__init__(config)

    def stop(self) -> None:
        """Ask the server to end; may be called from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the engine's thread, and listen."""
        self._engine.start(on_failure=self.stop)
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait for the running requests."""
        asyncio.get_running_loop().call_later(self._shutdown_s, self._engine.abort_all)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal; at the second, do so without waiting for requests."""

        def receive(number: int) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

        with signals.received_by(receive):
            yield

    def serve_until_stopped(self) -> None:
        """Serve until a signal, a call of `stop`, or a failure of the engine, which is raised."""
        try:
            asyncio.run(self.serve([self._listener]))
        finally:
            self._engine.stop()
        if self._engine.failure is not None:
            raise self._engine.failure


@contextmanager
def served(engine: Engine, options: ServeConfig, *, api_key: str | None = None) -> Iterator[str]:
    """Serve an engine over HTTP while in the context, from a thread; yield the server's URL.

    `options` are the fields of a server's config, and with `api_key` requests need that key. Raises
    the error with which the server ended, if any.
    """
    listener, ready = bind(options.host, options.port), threading.Event()
    server, url = (
        Server(engine, options, listener, api_key=api_key, ready=ready.set),
        url_of(listener),
    )
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(server.serve_until_stopped)
        running.add_done_callback(lambda _: ready.set())
        ready.wait()
        try:
            yield url
        finally:
            server.stop()
            running.result()
