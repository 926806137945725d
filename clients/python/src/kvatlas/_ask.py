"""Asking, and asking again, whatever carries the requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ._retry import Budget, Retry
from .errors import InternalError, KvatlasError, UnavailableError, error_of


class Outcome(NamedTuple):
    """What became of an attempt: a reply or an error, why it may be asked again, if it may, and whether it was sent."""

    reply: Any = None
    error: KvatlasError | None = None
    again: str = ""
    unsent: bool = False


class Transport(Protocol):
    """Carries attempts of requests."""

    budget: Budget

    def begin(self) -> int:
        """A number for a request, from which its attempts go on."""

    async def attempt(self, op: str, body: bytes, patience: float, number: int) -> Outcome:
        """Sends an attempt and waits for its outcome, until it is cancelled."""

    def refused(self, op: str) -> KvatlasError | None:
        """An error if whoever carries requests does not let this one pass, which is told by no reply."""

    async def close(self) -> None:
        """Ends connections."""


def read_reply(body: bytes) -> Outcome:
    """The outcome that is in the body of a reply."""
    try:
        said = json.loads(body)
    except ValueError as e:
        return Outcome(error=InternalError(f"the reply is not JSON: {e}"))
    return Outcome(said, error_of(said))


async def ask(to: Transport, op: str, body: bytes, *, once: bool, timeout: float, absent: float,
              asked_again: Callable[[str], None]) -> Any:
    """Sends a request, and again as long as that may help, unless it is sent once. Returns what the reply's JSON says."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    retry = Retry(timeout, absent, once)
    if timeout < 0.001:
        raise UnavailableError(f"no time is left to ask {op}")
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
                raise last or UnavailableError(f"nobody answers {op}")
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
