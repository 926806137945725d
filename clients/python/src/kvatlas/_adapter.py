"""What adapters to other routers have in common: a choice that fails is no failure of the request."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._client import AsyncClient, Result
from ._messages import Selection, SelectRequest
from .errors import InternalError, KvatlasError, UnavailableError

log = logging.getLogger("kvatlas")


class Chooser:
    """Chooses workers by `select`, and books requests on them until they end."""

    def __init__(self, urls: str | Sequence[str], timeout: float, book: bool, client: dict[str, Any]) -> None:
        self._options = {"urls": urls, "timeout": timeout, **client}
        self._client = AsyncClient(**self._options)
        self._timeout = timeout
        self._book = book
        self._last = ""  # the code of the last failure
        self._ends: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def choose(self, **request: Any) -> Selection | None:
        """The choice among request's workers; None if there is none: then the caller chooses as it would without."""
        if self._loop is not None and self._loop.is_closed():
            self._client = AsyncClient(**self._options)  # the connections of the one before went with its loop
        self._loop = asyncio.get_running_loop()
        if self._book:
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
        return chosen

    async def _select(self, request: dict[str, Any]) -> Selection:
        try:
            return await self._client.select(SelectRequest(**request))
        except BaseException as e:  # where its answer did not come, it may be booked all the same
            if self._book and (not isinstance(e, KvatlasError) or isinstance(e, (UnavailableError, InternalError))):
                self.end(request["model"], request["request_id"])
            raise

    def end(self, model: str, request_id: str, result: Result | None = None) -> None:
        """Ends a booked request, from any thread, without a wait. A failure penalises the worker for a moment."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._free, model, request_id, result)

    def _free(self, model: str, request_id: str, result: Result | None) -> None:
        task = asyncio.ensure_future(self._end(model, request_id, result))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _end(self, model: str, request_id: str, result: Result | None) -> None:
        try:
            await self._client.free(model, request_id, result=result, timeout=max(self._timeout, 5.0))
        except Exception as e:  # it expires by itself
            log.debug("free %s: %s", request_id, e)

    async def close(self) -> None:
        """Waits for what was ended, and ends the client."""
        await asyncio.sleep(0)  # what another thread has said
        await asyncio.gather(*self._ends, return_exceptions=True)
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
