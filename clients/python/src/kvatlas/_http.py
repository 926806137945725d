"""Requests over HTTP."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from ._ask import Outcome, read_reply
from ._retry import ABSENT, LOST, REFUSED, Budget
from .errors import InternalError, KvatlasError, NoWorkersError, UnavailableError

_METHODS = {"workers": "GET", "status": "GET"}
_PATHS = {"session_end": "sessions/end"}  # of operations with another name over HTTP


class HTTP:
    """HTTP sends requests to the URLs in turn. A retry goes to the next URL."""

    def __init__(self, urls: Sequence[str], token: str | None, tls: ssl.SSLContext | None,
                 options: Mapping[str, Any] | None) -> None:
        self.budget = Budget()
        self._urls = [url.rstrip("/") for url in urls]
        self._turns = itertools.count()
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # Indexers are near, so the client ignores proxies of the environment. ask() enforces all deadlines.
        usual: dict[str, Any] = {"trust_env": False, "timeout": None, "headers": headers,
                                 "limits": httpx.Limits(max_connections=None, max_keepalive_connections=100)}
        if tls is not None:
            usual["verify"] = tls
        self._client = httpx.AsyncClient(**{**usual, **(options or {})})

    def begin(self) -> int:
        return next(self._turns)

    async def attempt(self, op: str, body: bytes, patience: float, number: int) -> Outcome:
        url = self._urls[number % len(self._urls)]
        headers = {"Kv-Deadline-Ms": str(max(1, int(patience * 1000)))}
        try:
            reply = await self._client.request(_METHODS.get(op, "POST"), f"{url}/v1/{_PATHS.get(op, op)}",
                                               content=body, headers=headers)
        except httpx.InvalidURL as e:
            return Outcome(error=UnavailableError(f"{url} is not a valid URL: {e}"))
        except httpx.HTTPError as e:
            error = UnavailableError(f"the indexer at {url} cannot be reached: {e or type(e).__name__}")
            error.__cause__ = e
            if _untrusted(e):
                return Outcome(error=error)
            return Outcome(error=error, again=ABSENT if isinstance(e, httpx.ConnectError) else LOST)
        again = REFUSED if reply.status_code == 503 else ""
        outcome = read_reply(reply.content)
        if reply.is_success and outcome.error is None:
            return outcome
        if outcome.error is None or reply.is_success or outcome.reply is None:
            kind = UnavailableError if again else InternalError
            outcome = Outcome(error=kind(
                f"the reply of {url} ({reply.status_code} {reply.reason_phrase}) is not from an indexer; "
                "check the URL"))
        return Outcome(error=outcome.error, again="" if isinstance(outcome.error, NoWorkersError) else again)

    def refused(self, op: str) -> KvatlasError | None:
        return None

    async def close(self) -> None:
        await self._client.aclose()


def _untrusted(e: BaseException | None) -> bool:
    """Returns True if an untrusted certificate caused the error."""
    while e is not None:
        if isinstance(e, ssl.SSLCertVerificationError):
            return True
        e = e.__cause__ or e.__context__
    return False
