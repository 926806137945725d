"""Retries of requests, by the rules of docs/client.md, as in Go's pkg/client. Times are in seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOST = "lost"  # the connection was lost, or is not yet established
ABSENT = "absent"  # no node served the request
REFUSED = "refused"  # the node replied 503: it stops or is not ready
SLOW = "slow"  # no answer yet: a hedged request follows

SLOW_AFTER = 0.250  # longest wait before the first hedged request; the wait then doubles
NEVER_SLOW = 0.010  # shortest wait for an answer
FIRST_PAUSE = 0.020  # pause after the first failure; the pause doubles with each failure
LONG_PAUSE = 0.250  # longest pause

HEDGE_RATIO = 10  # one hedged request for every 10 other requests
HEDGE_BURST = 100  # hedged requests at once after a time without hedging
HEDGE_RATE = 10  # hedged requests per second in any case


class Budget:
    """Budget bounds hedged requests. It is safe for any number of threads.

    A hedged request repeats a request while a reply to the first may still arrive. Requests and time fill a budget.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._debt = 0.0
        self._filled = clock()

    def earn(self) -> None:
        """Adds a request that is not hedged to the budget."""
        with self._lock:
            self._debt = max(0.0, self._debt - 1)

    def spend(self) -> bool:
        """Removes a hedged request from the budget. Returns False if the budget is empty."""
        with self._lock:
            # Time fills the budget too. Otherwise, all callers of lost replies would wait until the deadline.
            now = self._clock()
            self._debt = max(0.0, self._debt - (now - self._filled) * HEDGE_RATE * HEDGE_RATIO)
            self._filled = now
            if self._debt + HEDGE_RATIO > HEDGE_BURST * HEDGE_RATIO:
                return False
            self._debt += HEDGE_RATIO
            return True


class Retry:
    """Retry is the state of a request with retries. Times count from the start of the request. One task owns it.

    If no attempt is pending, `at` is the time of the next attempt. If an attempt is pending, `at` is the time of a
    hedged request, and the wait doubles.

    left is the timeout. absent bounds the retries while no node can answer. once forbids a retry, unless no node has
    received the request.
    """

    def __init__(self, left: float, absent: float, once: bool) -> None:
        self.left = left
        self.bound = min(absent, left / 2)
        self.once = once
        self.pending = 0
        self.sent = 0
        self.unheard = 0  # attempts that no node received
        self.at = 0.0
        self.slow = min(SLOW_AFTER, max(left / 4, NEVER_SLOW))
        self.pause = FIRST_PAUSE
        self.why = ""
        self.absent_since: float | None = None

    def sends(self, now: float) -> None:
        """Records the start of an attempt."""
        self.pending += 1
        self.sent += 1
        self.at = now + self.slow

    def late(self, now: float, allowed: bool) -> None:
        """Records a late answer. allowed reports whether the budget permits a hedged request."""
        self.at = now + self.slow
        if allowed:
            self.at, self.slow, self.why = now, 2 * self.slow, SLOW

    def failed(self, now: float, why: str, unsent: bool = False) -> None:
        """Records a failed attempt. unsent: it was not sent. A lost connection fails all attempts."""
        self.pending -= 1
        if unsent or why == ABSENT:
            self.unheard += 1
        if why == LOST:
            self.pending, self.absent_since = 0, None
        elif self.absent_since is None:
            self.absent_since = now
        if self.pending <= 0:
            self.pending, self.why = 0, why
            self.at = now + self.pause
            self.pause = min(2 * self.pause, LONG_PAUSE)

    def over(self, now: float) -> bool:
        """Returns True if the request has failed: further retries are forbidden, or past the limit."""
        if self.pending:
            return False
        if self.once and self.sent > self.unheard:
            return True
        return self.absent_since is not None and min(now, self.at) - self.absent_since >= self.bound
