"""What adapters to other routers have in common: a choice that fails is no failure of the request."""

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
    """Chooses workers by `select`, and books requests on them until they end."""

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
        """Returns the choice among the request's workers, or None: then the caller chooses as it would without kvatlas.

        A booked request counts until `end`. Meanwhile it does not expire: its progress is reported every minute.
        """
        if self._loop is not None and self._loop.is_closed():
            self._client = AsyncClient(**self._options)  # the connections of the one before went with its loop
            self._reports = None
        self._loop = asyncio.get_running_loop()
        if self._book and book:
            request.update(book=True, request_id=uuid.uuid4().hex)
        try:
            chosen = await self._select(request)
        except Exception as e:  # whatever it is, the request goes on
            code = e.code if isinstance(e, KvatlasError) else type(e).__name__
            if code != self._last:
                log.warning("kvatlas chooses no worker, so this router's own way is taken: %s", e)
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
        except BaseException as e:  # where its answer did not come, it may be booked all the same
            booked = "request_id" in request
            if booked and (not isinstance(e, KvatlasError) or isinstance(e, (UnavailableError, InternalError))):
                self.end(request["model"], request["request_id"])
            raise

    def prefilled(self, model: str, request_id: str) -> None:
        """Reports the first token of a booked request. It is safe for any thread, and does not wait."""
        self._send(self._client.prefill_complete, model, request_id)

    def end(self, model: str, request_id: str, result: Result | None = None) -> None:
        """Ends a booked request, from any thread, without a wait. A failure penalises the worker for a moment."""
        self._running.pop(request_id, None)
        self._send(partial(self._client.free, result=result), model, request_id)

    def failed(self, worker: str, result: Result) -> None:
        """Penalises a worker for a moment. It is safe for any thread, and does not wait."""
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
        except Exception as e:  # a booking that is not freed expires
            log.debug("the report of %s failed: %s", what, e)

    async def _report(self) -> None:
        """Reports progress of the running requests, from the second period of a request on."""
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
        await asyncio.sleep(0)  # reports of other threads
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._client.close()


def prompt_of(request: Any) -> dict[str, Any]:
    """The request of a `SelectRequest`: a mapping or a model in OpenAI's form. It is empty without a prompt.

    The indexer decides about each field: which ones determine tokens, which ones the tenant. `extra_body` has more
    fields, as in OpenAI's client.
    """
    body = fields_of(request)
    return {"request": body} if body.get("messages") or body.get("prompt") else {}


def fields_of(request: Any) -> dict[str, Any]:
    """The fields of a request that are set, in JSON's types. The indexer gets the model by another field."""
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
        if hasattr(value, "model_dump"):  # iterating over a model gives pairs
            return value.model_dump(exclude_none=True)
        return [_plain(v) for v in value]
    return f"{type(value).__name__}, which is not JSON"  # a value that the indexer cannot interpret
