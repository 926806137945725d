"""Requests over NATS."""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

from ._ask import Outcome, read_reply
from ._retry import ABSENT, LOST, REFUSED, Budget
from .errors import (
    BusyError, ForbiddenError, InternalError, KvatlasError, MalformedError, NotReadyError, NoWorkersError, TooLargeError,
    UnavailableError,
)

try:
    from nats.aio.client import Client as Connection
    from nats.aio.msg import Msg
    from nats.errors import Error as NATSError
    from nats.errors import MaxPayloadError
except ImportError as e:  # pragma: no cover
    raise ImportError("clients over NATS need the package nats-py; install kvatlas[nats]") from e

_CONNECT_WAIT = 0.25  # wait of an attempt for a new connection, in seconds
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_BY_STATUS = {400: MalformedError, 413: TooLargeError, 429: BusyError, 500: TooLargeError, 503: NotReadyError}


class NATS:
    """NATS sends requests over a separate connection, opened by the first request. A subscription receives replies."""

    def __init__(self, urls: Sequence[str], namespace: str, tls: ssl.SSLContext | None,
                 options: Mapping[str, Any] | None) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ValueError(f"namespace {namespace!r}: use 1 to 32 of a-z, 0-9 and '-', first a letter or digit")
        self.budget = Budget()
        self._namespace = namespace
        self._usual: dict[str, Any] = {"servers": list(urls), "max_reconnect_attempts": -1, "reconnect_time_wait": 0.1,
                                       "ping_interval": 3, "max_outstanding_pings": 2, "name": "kvatlas client"}
        if tls is not None:
            self._usual["tls"] = tls
        self._usual.update(options or {})
        self._conn = Connection()
        self._connecting: asyncio.Task[None] | None = None
        self._inbox = ""
        self._replies: dict[str, asyncio.Future[Msg]] = {}
        self._numbers = itertools.count()
        self._trouble: BaseException | None = None  # last error of the connection
        self._refused: dict[str, str] = {}  # the server's messages about denied subjects, by subject

    def begin(self) -> int:
        if self._connecting is None or self._conn.is_closed:
            self._conn = Connection()
            self._connecting = asyncio.ensure_future(self._connect(self._conn))
        self._refused = {to: why for to, why in self._refused.items() if to == self._inbox}
        return 0

    async def attempt(self, op: str, body: bytes, patience: float, number: int) -> Outcome:
        assert self._connecting is not None
        await asyncio.wait([self._connecting], timeout=_CONNECT_WAIT)
        if self._connecting.cancelled():
            return Outcome(error=UnavailableError("the client is closed"))
        if self._connecting.done() and (error := self._connecting.exception()):
            return Outcome(error=_caused(UnavailableError(f"no NATS server: {error}"), error))
        if not self._connecting.done() or not self._conn.is_connected:
            return self._lost(op)._replace(unsent=True)
        reply_to = f"{self._inbox}.{next(self._numbers)}"
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._replies[reply_to] = reply
        headers = {"Content-Type": "application/json", "Kv-Deadline-Ms": str(max(1, int(patience * 1000)))}
        try:
            await self._conn.publish(self._subject(op), body, reply=reply_to, headers=headers)
            return self._outcome(await reply)
        except MaxPayloadError:
            return Outcome(error=TooLargeError(
                f"the request has {len(body)} bytes, more than the NATS server accepts; send hashes instead of "
                "tokens, or use HTTP, with a limit of 8 MiB"))
        except _Disconnected:
            return self._lost(op)
        except NATSError as e:
            self._trouble = e
            return self._lost(op)
        finally:
            del self._replies[reply_to]

    def refused(self, op: str) -> KvatlasError | None:
        why = self._refused.get(self._subject(op)) or self._refused.get(self._inbox)
        return ForbiddenError(f"this NATS user has no permission for the request: {why}") if why else None

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        await self._conn.close()
        self._end_all()

    def _subject(self, op: str) -> str:
        return f"kv.v1.{self._namespace}.q.{op}"

    async def _connect(self, conn: Connection) -> None:
        await conn.connect(error_cb=self._on_error, disconnected_cb=self._on_disconnect,
                           closed_cb=self._on_disconnect, **self._usual)
        self._inbox = conn.new_inbox()
        await conn.subscribe(self._inbox + ".*", cb=self._on_reply)

    async def _on_reply(self, msg: Msg) -> None:
        reply = self._replies.get(msg.subject)
        if reply is not None and not reply.done():
            reply.set_result(msg)

    async def _on_error(self, error: Exception) -> None:
        self._trouble = error
        # nats: permissions violation for publish to "kv.v1.default.q.find"
        if m := re.search(r'permissions violation for (publish|subscription) to "([^"]*)"', str(error), re.IGNORECASE):
            self._refused[m[2] if m[1].lower() == "publish" else self._inbox] = str(error)

    async def _on_disconnect(self) -> None:
        self._refused.clear()
        self._end_all()

    def _end_all(self) -> None:
        """Fails all requests in flight, because replies are unlikely after a lost connection."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_Disconnected())

    def _lost(self, op: str) -> Outcome:
        error = UnavailableError(f"request {op}: there is no connection to a NATS server" +
                                 (f": {self._trouble}" if self._trouble else ""))
        return Outcome(error=_caused(error, self._trouble), again="" if self._conn.is_closed else LOST)

    def _outcome(self, msg: Msg) -> Outcome:
        headers = msg.headers or {}
        if not msg.data and headers.get("Status") == "503":
            return Outcome(error=NotReadyError(
                f'no indexer of namespace "{self._namespace}" answers on this NATS server: it is not running, or '
                "still restoring"), again=ABSENT)
        code = headers.get("Nats-Service-Error-Code")
        if code is None:
            return read_reply(msg.data)
        again = REFUSED if code == "503" else ""
        if msg.data and (error := read_reply(msg.data).error):
            return Outcome(error=error, again="" if isinstance(error, NoWorkersError) else again)
        kind = _BY_STATUS.get(int(code), InternalError) if code.isdigit() else InternalError
        return Outcome(error=kind(f"{headers.get('Nats-Service-Error', '')} ({code})"), again=again)


class _Disconnected(Exception):
    """_Disconnected is the error of requests in flight after a lost connection."""


def _caused(error: KvatlasError, by: BaseException | None) -> KvatlasError:
    error.__cause__ = by
    return error
