"""Clients of indexers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from . import _wire
from ._ask import Transport, ask
from ._http import HTTP
from ._messages import (
    Answer, Booking, BookRequest, LoadList, PotentialList, Prompt, Query, RankPlace, SelectRequest, Selection,
    SessionList, Status, WorkerInfo, WorkerList,
)

T = TypeVar("T")

# Result is the result of a request at a worker: a success; no connection to the worker; a connection that ended before
# the whole answer; an answer with a status of 5xx; no answer in time.
Result = Literal["ok", "refused", "broken", "status", "timeout"]

_WORKERS_PAGE = 500  # ranks in a page


class AsyncClient:
    """AsyncClient sends requests to indexers, over HTTP or NATS. It belongs to one event loop.

    Any number of tasks of the loop may use the client. The first request opens a connection.

    urls are the URLs of the nodes' HTTP ports, such as http://127.0.0.1:8090, or of NATS servers, such as
    nats://127.0.0.1:4222. NATS requires the extra kvatlas[nats]. Options:

    - namespace: namespace of the indexers, over NATS only;
    - timeout: limit in seconds for a request with all retries, unless the method has a timeout;
    - absent: limit in seconds for the retries while no node can answer, and never more than half of the timeout;
    - asked_again: function that the client calls with the reason of every retry: lost, absent, refused or slow;
    - token: bearer token for the HTTP port, over HTTP only;
    - tls: trusted certificates, and certificates of this client, for https:// and tls://;
    - options: further arguments of httpx.AsyncClient or nats.connect.

    The constructor raises ValueError for URLs of other schemes, an invalid namespace, or a token with NATS. It raises
    ImportError for NATS without the extra.

    The methods retry requests by the rules of docs/client.md. A method that sends a request once retries only if no
    node has received the request. All methods raise a `KvatlasError` for a failed request, TypeError or ValueError for
    values without a form in JSON, and RuntimeError after `close`.
    """

    def __init__(self, urls: str | Sequence[str], *, namespace: str = "default", timeout: float = 5.0,
                 absent: float = 2.0, asked_again: Callable[[str], None] | None = None, token: str | None = None,
                 tls: ssl.SSLContext | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._to = _transport([urls] if isinstance(urls, str) else list(urls), namespace, token, tls, options)
        self._timeout = timeout
        self._absent = absent
        self._asked_again = asked_again or (lambda why: None)
        self._closed = False

    async def find(self, query: Query, *, timeout: float | None = None) -> Answer:
        """Returns the workers that hold blocks of a prompt, best first."""
        return await self._call(Answer, "find", query, timeout)

    async def select(self, request: SelectRequest, *, timeout: float | None = None) -> Selection:
        """Chooses a worker for a prompt. With `book`, the client also books the request there, and sends it once."""
        return await self._call(Selection, "select", request, timeout, once=request.book)

    async def book(self, request: BookRequest, *, timeout: float | None = None) -> Booking:
        """Books a request on the named worker, or on the choice of `select` for the id. The client sends it once."""
        return await self._call(Booking, "book", request, timeout, once=True)

    async def prefill_complete(self, model: str, request_id: str, *, timeout: float | None = None) -> None:
        """Reports the first output token of a booked request. The report is idempotent."""
        await self._reply("prefill_complete", {"model": model, "request_id": request_id}, timeout)

    async def progress(self, model: str, request_id: str, *, timeout: float | None = None) -> None:
        """Reports that a booked request is still running: `--request-expiry` starts again. The report is idempotent."""
        await self._reply("progress", {"model": model, "request_id": request_id}, timeout)

    async def output_block(self, model: str, request_id: str, *, decay_fraction: float | None = None,
                           timeout: float | None = None) -> None:
        """Reports another full block of output of a booked request. The client sends it once.

        decay_fraction, from 0 to 1, is the new weight of the request's own blocks; None: unchanged.
        """
        ref: dict[str, Any] = {"model": model, "request_id": request_id}
        if decay_fraction is not None:
            ref["decay_fraction"] = decay_fraction
        await self._reply("output_block", ref, timeout, once=True)

    async def free(self, model: str, request_id: str, *, result: Result | None = None,
                   timeout: float | None = None) -> None:
        """Ends a booked request. The client sends it once. A booking without `free` expires.

        A failure in result penalises the worker for a moment. "ok" ends the penalty. None: the result is unknown.
        """
        ref = {"model": model, "request_id": request_id, **({"result": result} if result else {})}
        await self._reply("free", ref, timeout, once=True)

    async def report_result(self, worker: str, result: Result, *, timeout: float | None = None) -> None:
        """Reports the result of a request without a booking at a worker, as `free` does for a booked request."""
        await self._reply("engine_load", {"results": [{"worker": worker, "result": result}]}, timeout)

    async def loads(self, model: str | None = None, *, timeout: float | None = None) -> LoadList:
        """Returns the outstanding work of the workers of a model, or of all models."""
        return await self._call(LoadList, "loads", {"model": model} if model else {}, timeout)

    async def potential_loads(self, prompt: Prompt, *, timeout: float | None = None) -> PotentialList:
        """Returns the outstanding work of each worker with a further prompt."""
        return await self._call(PotentialList, "potential_loads", prompt, timeout)

    async def sessions(self, model: str | None = None, session_id: str | None = None, *, limit: int | None = None,
                       prompts: bool = False, timeout: float | None = None) -> SessionList:
        """Returns the sessions with a worker, the last used first, at most limit of them (default 1,000).

        model and session_id restrict the list. With a session_id, the list also has the session's blocks on each rank.
        prompts adds sessions without an id.
        """
        request: dict[str, Any] = {"model": model, "session_id": session_id, "limit": limit, "prompts": prompts or None}
        return await self._call(SessionList, "sessions", {k: v for k, v in request.items() if v is not None}, timeout)

    async def end_session(self, session_id: str, model: str | None = None, *,
                          timeout: float | None = None) -> SessionList:
        """Ends a session of a model, or of all models, and returns the ended sessions.

        The worker of the session's next request is chosen freely. A session without a worker is no error.
        """
        request = {"session_id": session_id, **({"model": model} if model else {})}
        return await self._call(SessionList, "session_end", request, timeout)

    async def workers(self, *, timeout: float | None = None) -> WorkerList:
        """Returns all ranks in the log. The list arrives in pages, and timeout applies to each page.

        The list may lack a rank that appears or disappears meanwhile.
        """
        workers: list[WorkerInfo] = []
        missing: set[int] = set()
        after: RankPlace | None = None
        while True:
            request = {"limit": _WORKERS_PAGE, **({"after": after} if after else {})}
            part = await self._call(WorkerList, "workers", request, timeout)
            workers += part.workers
            missing.update(part.missing)
            after = part.next
            if after is None:
                return WorkerList(tuple(workers), not missing, tuple(sorted(missing)))

    async def status(self, node: str | None = None, *, timeout: float | None = None) -> Status:
        """Returns the status of the answering node, or of the named node."""
        reply = await self._reply("status", {"node": node} if node else {}, timeout)
        return _wire.decode(Status, {**reply, "raw": reply})

    async def close(self) -> None:
        """Closes the connections of the client."""
        self._closed = True
        await self._to.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    async def _reply(self, op: str, request: object, timeout: float | None, once: bool = False) -> Any:
        if self._closed:
            raise RuntimeError("the client is closed")
        return await ask(self._to, op, _wire.encode(request), once=once, absent=self._absent,
                         timeout=self._timeout if timeout is None else timeout, asked_again=self._asked_again)

    async def _call(self, kind: type[T], op: str, request: object, timeout: float | None, once: bool = False) -> T:
        return _wire.decode(kind, await self._reply(op, request, timeout, once))


class Client:
    """Client sends requests to indexers and blocks until the answer. It is safe for any number of threads.

    Options, methods and errors are the same as of `AsyncClient`. A background thread runs the requests and calls
    asked_again. A forked process starts a new thread with the first request.
    """

    def __init__(self, urls: str | Sequence[str], *, namespace: str = "default", timeout: float = 5.0,
                 absent: float = 2.0, asked_again: Callable[[str], None] | None = None, token: str | None = None,
                 tls: ssl.SSLContext | None = None, options: Mapping[str, Any] | None = None) -> None:
        def make() -> AsyncClient:
            return AsyncClient(urls, namespace=namespace, timeout=timeout, absent=absent, asked_again=asked_again,
                               token=token, tls=tls, options=options)

        self._make = make
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def find(self, query: Query, *, timeout: float | None = None) -> Answer:
        """Returns the workers that hold blocks of a prompt, best first."""
        return self._run(lambda c: c.find(query, timeout=timeout))

    def select(self, request: SelectRequest, *, timeout: float | None = None) -> Selection:
        """Chooses a worker for a prompt. With `book`, the client also books the request there, and sends it once."""
        return self._run(lambda c: c.select(request, timeout=timeout))

    def book(self, request: BookRequest, *, timeout: float | None = None) -> Booking:
        """Books a request on the named worker, or on the choice of `select` for the id. The client sends it once."""
        return self._run(lambda c: c.book(request, timeout=timeout))

    def prefill_complete(self, model: str, request_id: str, *, timeout: float | None = None) -> None:
        """Reports the first output token of a booked request. The report is idempotent."""
        self._run(lambda c: c.prefill_complete(model, request_id, timeout=timeout))

    def output_block(self, model: str, request_id: str, *, decay_fraction: float | None = None,
                     timeout: float | None = None) -> None:
        """Reports another full block of output of a booked request. The client sends it once.

        decay_fraction, from 0 to 1, is the new weight of the request's own blocks; None: unchanged.
        """
        self._run(lambda c: c.output_block(model, request_id, decay_fraction=decay_fraction, timeout=timeout))

    def progress(self, model: str, request_id: str, *, timeout: float | None = None) -> None:
        """Reports that a booked request is still running: `--request-expiry` starts again. The report is idempotent."""
        self._run(lambda c: c.progress(model, request_id, timeout=timeout))

    def free(self, model: str, request_id: str, *, result: Result | None = None, timeout: float | None = None) -> None:
        """Ends a booked request. The client sends it once. A booking without `free` expires.

        A failure in result penalises the worker for a moment. "ok" ends the penalty. None: the result is unknown.
        """
        self._run(lambda c: c.free(model, request_id, result=result, timeout=timeout))

    def report_result(self, worker: str, result: Result, *, timeout: float | None = None) -> None:
        """Reports the result of a request without a booking at a worker, as `free` does for a booked request."""
        self._run(lambda c: c.report_result(worker, result, timeout=timeout))

    def loads(self, model: str | None = None, *, timeout: float | None = None) -> LoadList:
        """Returns the outstanding work of the workers of a model, or of all models."""
        return self._run(lambda c: c.loads(model, timeout=timeout))

    def potential_loads(self, prompt: Prompt, *, timeout: float | None = None) -> PotentialList:
        """Returns the outstanding work of each worker with a further prompt."""
        return self._run(lambda c: c.potential_loads(prompt, timeout=timeout))

    def sessions(self, model: str | None = None, session_id: str | None = None, *, limit: int | None = None,
                 prompts: bool = False, timeout: float | None = None) -> SessionList:
        """Returns the sessions with a worker, the last used first, at most limit of them (default 1,000).

        model and session_id restrict the list. With a session_id, the list also has the session's blocks on each rank.
        prompts adds sessions without an id.
        """
        return self._run(lambda c: c.sessions(model, session_id, limit=limit, prompts=prompts, timeout=timeout))

    def end_session(self, session_id: str, model: str | None = None, *, timeout: float | None = None) -> SessionList:
        """Ends a session of a model, or of all models, and returns the ended sessions.

        The worker of the session's next request is chosen freely. A session without a worker is no error.
        """
        return self._run(lambda c: c.end_session(session_id, model, timeout=timeout))

    def workers(self, *, timeout: float | None = None) -> WorkerList:
        """Returns all ranks in the log. The list arrives in pages, and timeout applies to each page.

        The list may lack a rank that appears or disappears meanwhile.
        """
        return self._run(lambda c: c.workers(timeout=timeout))

    def status(self, node: str | None = None, *, timeout: float | None = None) -> Status:
        """Returns the status of the answering node, or of the named node."""
        return self._run(lambda c: c.status(node, timeout=timeout))

    def close(self) -> None:
        """Closes the connections and ends the thread. Running requests of other threads raise RuntimeError."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Closes the connections and cancels the requests of other threads."""
        await self._client.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._client = self._make()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvatlas", daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._pid != os.getpid():
                self._start()
            future = asyncio.run_coroutine_threadsafe(call(self._client), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the client was closed during the request") from None
        except BaseException:
            future.cancel()
            raise


def _transport(urls: list[str], namespace: str, token: str | None, tls: ssl.SSLContext | None,
               options: Mapping[str, Any] | None) -> Transport:
    schemes = {url.partition("://")[0] if "://" in url else "" for url in urls}
    if urls and schemes <= {"http", "https"}:
        return HTTP(urls, token, tls, options)
    if urls and schemes <= {"nats", "tls"}:
        if token:
            raise ValueError('token is valid over HTTP only; over NATS, set options={"token": ...}')
        from ._nats import NATS
        return NATS(urls, namespace, tls, options)
    raise ValueError(f"{urls} are not URLs of indexers' HTTP ports (http://, https://) or of NATS servers (nats://, tls://)")
