"""Requests with retries, over any transport."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ._retry import Budget, Retry
from .errors import InternalError, KvatlasError, UnavailableError, error_of


class Outcome(NamedTuple):
    """Outcome is the result of an attempt.

    reply is decoded from JSON. error is set in place of a reply. again is the reason for a retry; empty: the outcome of
    the request. unsent means that the attempt was not sent.
    """

    reply: Any = None
    error: KvatlasError | None = None
    again: str = ""
    unsent: bool = False


class Transport(Protocol):
    """Transport sends the attempts of requests. It belongs to one event loop."""

    budget: Budget

    def begin(self) -> int:
        """Starts a request and returns a number. The numbers of the attempts count on from there."""

    async def attempt(self, op: str, body: bytes, patience: float, number: int) -> Outcome:
        """Sends an attempt and returns the outcome. patience is the remaining time in seconds."""

    def refused(self, op: str) -> KvatlasError | None:
        """Returns an error if the NATS server forbids the request; else None. No reply reports a denial."""

    async def close(self) -> None:
        """Closes the connections."""


def read_reply(body: bytes) -> Outcome:
    """Returns the outcome for the body of a reply."""
    try:
        said = json.loads(body)
    except ValueError as e:
        return Outcome(error=InternalError(f"the reply is not JSON: {e}"))
    return Outcome(said, error_of(said))


async def ask(to: Transport, op: str, body: bytes, *, once: bool, timeout: float, absent: float,
              asked_again: Callable[[str], None]) -> Any:
    """Sends a request, with retries, and returns the reply decoded from JSON. Errors are of type `KvatlasError`.

    timeout bounds all attempts. absent bounds the retries while no node can answer. Both are in seconds. once forbids a
    retry, unless no node has received the request. asked_again is called with the reason of every retry.
    """
    clock = asyncio.get_running_loop().time
    begun = clock()
    retry = Retry(timeout, absent, once)
    if timeout < 0.001:
        raise UnavailableError(f"no time is left for the request {op}; use a longer timeout")
    to.budget.earn()
    number = to.begin()
    last: KvatlasError | None = None
    attempts: set[asyncio.Task[Outcome]] = set()
    try:
        while True:
            now = clock() - begun
            if now >= timeout:
                if retry.pending or last is None:
                    raise UnavailableError(f"no answer in time to {op}, requests sent: {retry.sent}")
                raise last
            if retry.over(now):
                raise last or UnavailableError(f"no node answers the request {op}")
            if now >= retry.at:
                if retry.pending:
                    if refused := to.refused(op):
                        raise refused
                    # every copy of a select may wait for a worker
                    allowed = not once and op != "select" and to.budget.spend()
                    retry.late(now, allowed)
                    if not allowed:
                        continue
                if retry.sent:
                    asked_again(retry.why)
                retry.sends(now)
                attempts.add(asyncio.ensure_future(to.attempt(op, body, timeout - now, number + retry.sent)))
            wait = max(0.0, min(retry.at, timeout) - now)
            if not attempts:
                await asyncio.sleep(wait)
                continue
            done, attempts = await asyncio.wait(attempts, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            for outcome in [d.result() for d in done]:
                if not outcome.again:
                    if outcome.error:
                        raise outcome.error
                    return outcome.reply
                last = outcome.error
                retry.failed(clock() - begun, outcome.again, outcome.unsent)
    finally:
        for attempt in attempts:
            attempt.cancel()
