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

# The end of a request at a worker: a success; no connection; a connection that ended before the whole answer; a status
# of 5xx; no answer in time.
Result = Literal["ok", "refused", "broken", "status", "timeout"]

_WORKERS_PAGE = 500  # ranks at a time


class AsyncClient:
    """Asks indexers. It belongs to one event loop; any number of its tasks may use it.

    urls are those of the nodes' HTTP ports, such as http://127.0.0.1:8090, or of NATS servers, such as
    nats://127.0.0.1:4222, for which kvatlas[nats] is to be installed. Options:

    - namespace: over NATS, whose indexers are asked;
    - timeout: how many seconds a request may take that names none itself;
    - absent: how many seconds a request is asked again while nobody can answer it, but at most half of its time;
    - asked_again: is told why each time that a request is asked again: lost, absent, refused, slow;
    - token: over HTTP, the bearer token that the port wants;
    - tls: over https:// and tls://, the certificates that are trusted, and those of this client;
    - options: what else httpx.AsyncClient or nats.connect takes.
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
        """Who holds how much of a prompt?"""
        return await self._call(Answer, "find", query, timeout)

    async def select(self, request: SelectRequest, *, timeout: float | None = None) -> Selection:
        """Which worker should serve a prompt? With `book`, the request is booked there, and sent once."""
        return await self._call(Selection, "select", request, timeout, once=request.book)

    async def book(self, request: BookRequest, *, timeout: float | None = None) -> Booking:
        """Books a request on the worker that it names, or on the one that `select` chose. It is sent once."""
        return await self._call(Booking, "book", request, timeout, once=True)

    async def prefill_complete(self, model: str, request_id: str, *, timeout: float | None = None) -> None:
        """The first output token of a request has come. It may be said again."""
        await self._reply("prefill_complete", {"model": model, "request_id": request_id}, timeout)

    async def progress(self, model: str, request_id: str, *, timeout: float | None = None) -> None:
        """Reports that a request is still running: `--request-expiry` starts again."""
        await self._reply("progress", {"model": model, "request_id": request_id}, timeout)

    async def output_block(self, model: str, request_id: str, *, decay_fraction: float | None = None,
                           timeout: float | None = None) -> None:
        """A request has filled another block with output. It is sent once."""
        ref: dict[str, Any] = {"model": model, "request_id": request_id}
        if decay_fraction is not None:
            ref["decay_fraction"] = decay_fraction
        await self._reply("output_block", ref, timeout, once=True)

    async def free(self, model: str, request_id: str, *, result: Result | None = None,
                   timeout: float | None = None) -> None:
        """Ends a request. The call is sent once, and a request that is not freed expires. A failure in `result` penalises
        the worker for a moment, and "ok" ends the penalty."""
        ref = {"model": model, "request_id": request_id, **({"result": result} if result else {})}
        await self._reply("free", ref, timeout, once=True)

    async def report_result(self, worker: str, result: Result, *, timeout: float | None = None) -> None:
        """Reports the end of a request without a booking, as `free` does for a request with one."""
        await self._reply("engine_load", {"results": [{"worker": worker, "result": result}]}, timeout)

    async def loads(self, model: str | None = None, *, timeout: float | None = None) -> LoadList:
        """What workers have to do: of one model, or of all."""
        return await self._call(LoadList, "loads", {"model": model} if model else {}, timeout)

    async def potential_loads(self, prompt: Prompt, *, timeout: float | None = None) -> PotentialList:
        """What each worker would have to do with a prompt beside what it has."""
        return await self._call(PotentialList, "potential_loads", prompt, timeout)

    async def sessions(self, model: str | None = None, session_id: str | None = None, *, limit: int | None = None,
                       prompts: bool = False, timeout: float | None = None) -> SessionList:
        """Returns the sessions with a worker, the last used first: at most `limit` (1,000). With a session_id, the list
        has the session's blocks on each worker. `prompts` adds sessions without an id."""
        request: dict[str, Any] = {"model": model, "session_id": session_id, "limit": limit, "prompts": prompts or None}
        return await self._call(SessionList, "sessions", {k: v for k, v in request.items() if v is not None}, timeout)

    async def end_session(self, session_id: str, model: str | None = None, *,
                          timeout: float | None = None) -> SessionList:
        """Ends a session, of one model or of all, and returns it. Its next request is chosen freely. A session without
        a worker is no error."""
        request = {"session_id": session_id, **({"model": model} if model else {})}
        return await self._call(SessionList, "session_end", request, timeout)

    async def workers(self, *, timeout: float | None = None) -> WorkerList:
        """All ranks that the log knows. They travel in parts, each of which may take the time."""
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
        """How is the node doing that answers, or the one that is named?"""
        reply = await self._reply("status", {"node": node} if node else {}, timeout)
        return _wire.decode(Status, {**reply, "raw": reply})

    async def close(self) -> None:
        """Ends the client's connections."""
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
    """Asks indexers as `AsyncClient` does, with its options, from any thread and outside of an event loop.

    A thread of its own runs the requests; a process that was forked starts another.
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
        """Who holds how much of a prompt?"""
        return self._run(lambda c: c.find(query, timeout=timeout))

    def select(self, request: SelectRequest, *, timeout: float | None = None) -> Selection:
        """Which worker should serve a prompt? With `book`, the request is booked there, and sent once."""
        return self._run(lambda c: c.select(request, timeout=timeout))

    def book(self, request: BookRequest, *, timeout: float | None = None) -> Booking:
        """Books a request on the worker that it names, or on the one that `select` chose. It is sent once."""
        return self._run(lambda c: c.book(request, timeout=timeout))

    def prefill_complete(self, model: str, request_id: str, *, timeout: float | None = None) -> None:
        """The first output token of a request has come. It may be said again."""
        self._run(lambda c: c.prefill_complete(model, request_id, timeout=timeout))

    def output_block(self, model: str, request_id: str, *, decay_fraction: float | None = None,
                     timeout: float | None = None) -> None:
        """A request has filled another block with output. It is sent once."""
        self._run(lambda c: c.output_block(model, request_id, decay_fraction=decay_fraction, timeout=timeout))

    def progress(self, model: str, request_id: str, *, timeout: float | None = None) -> None:
        """Reports that a request is still running: `--request-expiry` starts again."""
        self._run(lambda c: c.progress(model, request_id, timeout=timeout))

    def free(self, model: str, request_id: str, *, result: Result | None = None, timeout: float | None = None) -> None:
        """Ends a request. The call is sent once, and a request that is not freed expires. A failure in `result` penalises
        the worker for a moment, and "ok" ends the penalty."""
        self._run(lambda c: c.free(model, request_id, result=result, timeout=timeout))

    def report_result(self, worker: str, result: Result, *, timeout: float | None = None) -> None:
        """Reports the end of a request without a booking, as `free` does for a request with one."""
        self._run(lambda c: c.report_result(worker, result, timeout=timeout))

    def loads(self, model: str | None = None, *, timeout: float | None = None) -> LoadList:
        """What workers have to do: of one model, or of all."""
        return self._run(lambda c: c.loads(model, timeout=timeout))

    def potential_loads(self, prompt: Prompt, *, timeout: float | None = None) -> PotentialList:
        """What each worker would have to do with a prompt beside what it has."""
        return self._run(lambda c: c.potential_loads(prompt, timeout=timeout))

    def sessions(self, model: str | None = None, session_id: str | None = None, *, limit: int | None = None,
                 prompts: bool = False, timeout: float | None = None) -> SessionList:
        """Returns the sessions with a worker, the last used first: at most `limit` (1,000). With a session_id, the list
        has the session's blocks on each worker. `prompts` adds sessions without an id."""
        return self._run(lambda c: c.sessions(model, session_id, limit=limit, prompts=prompts, timeout=timeout))

    def end_session(self, session_id: str, model: str | None = None, *, timeout: float | None = None) -> SessionList:
        """Ends a session, of one model or of all, and returns it. Its next request is chosen freely. A session without
        a worker is no error."""
        return self._run(lambda c: c.end_session(session_id, model, timeout=timeout))

    def workers(self, *, timeout: float | None = None) -> WorkerList:
        """All ranks that the log knows. They travel in parts, each of which may take the time."""
        return self._run(lambda c: c.workers(timeout=timeout))

    def status(self, node: str | None = None, *, timeout: float | None = None) -> Status:
        """How is the node doing that answers, or the one that is named?"""
        return self._run(lambda c: c.status(node, timeout=timeout))

    def close(self) -> None:
        """Ends the client's connections and its thread."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed or self._pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Ends the connections, and what other threads wait for."""
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
            raise RuntimeError("the client was closed meanwhile") from None
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
            raise ValueError('token is for HTTP; a token of NATS goes into options, as {"token": ...}')
        from ._nats import NATS
        return NATS(urls, namespace, tls, options)
    raise ValueError(f"{urls} are not URLs of indexers' HTTP ports (http://, https://) or of NATS servers (nats://, tls://)")
