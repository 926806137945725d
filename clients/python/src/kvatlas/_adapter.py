"""Common parts of the adapters to other routers. A failed choice never fails the request."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ._client import AsyncClient, Result
from ._messages import Selection, SelectRequest
from .errors import InternalError, KvatlasError, UnavailableError

log = logging.getLogger("kvatlas")


class Chooser:
    """Chooser chooses workers by `select`, and books requests until their end.

    timeout bounds a choice. progress is the time between two reports of a running request, less than half of
    `--request-expiry`. Both are in seconds. book makes requests count as load. client has further arguments of
    `AsyncClient`. The methods `choose` and `close` belong to an event loop. The other methods are safe for any thread.
    """

    def __init__(self, urls: str | Sequence[str], timeout: float, book: bool, client: dict[str, Any],
                 progress: float = 60.0) -> None:
        self._options = {"urls": urls, "timeout": timeout, **client}
        self._client = AsyncClient(**self._options)
        self._timeout = timeout
        self._book = book
        self._progress = progress
        self._running: dict[str, str] = {}  # the models of the running requests, by id
        self._reports: asyncio.Task[None] | None = None
        self._last = ""  # the code of the last failure
        self._sending: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def choose(self, *, book: bool = True, **request: Any) -> Selection | None:
        """Returns the choice among the request's workers; None after a failure, for a choice without kvatlas.

        request has fields of a `SelectRequest`. A booked request counts as load until `end`. The chooser reports the
        progress of the request, so that the booking does not expire meanwhile.
        """
        if self._loop is not None and self._loop.is_closed():
            self._client = AsyncClient(**self._options)  # the old connections ended with the old loop
            self._reports = None
        self._loop = asyncio.get_running_loop()
        if self._book and book:
            request.update(book=True, request_id=uuid.uuid4().hex)
        try:
            chosen = await self._select(request)
        except Exception as e:  # the request continues after any failure
            code = e.code if isinstance(e, KvatlasError) else type(e).__name__
            if code != self._last:
                log.warning("kvatlas chooses no worker, so the router chooses without kvatlas: %s", e)
            self._last = code
            return None
        if self._last:
            log.info("kvatlas chooses workers again")
        self._last = ""
        if chosen.booked:
            self._running[chosen.request_id] = request["model"]
            if self._reports is None:
                self._reports = asyncio.ensure_future(self._report())
        return chosen

    async def _select(self, request: dict[str, Any]) -> Selection:
        try:
            return await self._client.select(SelectRequest(**request))
        except BaseException as e:  # without an answer, the request may be booked
            booked = "request_id" in request
            if booked and (not isinstance(e, KvatlasError) or isinstance(e, (UnavailableError, InternalError))):
                self.end(request["model"], request["request_id"])
            raise

    def prefilled(self, model: str, request_id: str) -> None:
        """Reports the first token of a booked request, without a wait."""
        self._send(self._client.prefill_complete, model, request_id)

    def end(self, model: str, request_id: str, result: Result | None = None) -> None:
        """Ends a booked request, without a wait. A failure in result penalises the worker for a moment."""
        self._running.pop(request_id, None)
        self._send(partial(self._client.free, result=result), model, request_id)

    def failed(self, worker: str, result: Result) -> None:
        """Reports a failed request without a booking, without a wait. The failure penalises the worker for a moment."""
        self._send(self._client.report_result, worker, result)

    def _send(self, report: Callable[..., Awaitable[None]], *what: str) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._start, report, *what)

    def _start(self, report: Callable[..., Awaitable[None]], *what: str) -> None:
        task = asyncio.ensure_future(self._sent(report, *what))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _sent(self, report: Callable[..., Awaitable[None]], *what: str) -> None:
        try:
            await report(*what, timeout=max(self._timeout, 5.0))
        except Exception as e:  # without a report, the booking expires
            log.debug("the report of %s failed: %s", what, e)

    async def _report(self) -> None:
        """Reports the progress of running requests in every period, from the second period of a request on."""
        before: set[str] = set()
        while True:
            await asyncio.sleep(self._progress)
            for request_id in [r for r in self._running if r in before]:
                if model := self._running.get(request_id):
                    await self._sent(self._client.progress, model, request_id)
            before = set(self._running)

    async def close(self) -> None:
        """Sends the waiting reports and closes the client."""
        if self._reports is not None:
            self._reports.cancel()
        await asyncio.sleep(0)  # starts the reports of other threads
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._client.close()


def prompt_of(request: Any) -> dict[str, Any]:
    """Returns the field `request` of a `SelectRequest`; an empty dict without a prompt.

    request is a mapping or a model in OpenAI's form. `extra_body` may have further fields, as in OpenAI's client. The
    indexer determines the effect of each field, such as on tokens or on the tenant.
    """
    body = fields_of(request)
    return {"request": body} if body.get("messages") or body.get("prompt") else {}


def fields_of(request: Any) -> dict[str, Any]:
    """Returns the set fields of a request as JSON types, without the model, which has a field of its own."""
    if not isinstance(request, Mapping):
        dump = getattr(request, "model_dump", None)
        request = dump(exclude_unset=True) if dump else getattr(request, "__dict__", {})
    more = request.get("extra_body")
    body = {**request, **(more if isinstance(more, Mapping) else {})}
    return {name: _plain(value) for name, value in body.items()
            if value is not None and name not in ("model", "extra_body")}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], int):
        return value  # tokens
    if isinstance(value, Iterable):
        if hasattr(value, "model_dump"):  # an iteration over a model yields pairs
            return value.model_dump(exclude_none=True)
        return [_plain(v) for v in value]
    return f"{type(value).__name__}, which is not JSON"  # the indexer accepts no such value
