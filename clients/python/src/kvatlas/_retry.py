"""When a request is asked again, as docs/client.md says and Go's pkg/client does. Times are in seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOST = "lost"  # the connection was, or there is none yet
ABSENT = "absent"  # nobody served at that moment
REFUSED = "refused"  # who was asked cannot answer now (503)
SLOW = "slow"  # no answer yet: another request is sent beside the first

SLOW_AFTER = 0.250  # without an answer, or a quarter of the time; then twice as long, and so on
NEVER_SLOW = 0.010  # no answer is late before
FIRST_PAUSE = 0.020  # after the first failure, doubled with each further one
LONG_PAUSE = 0.250  # the longest

HEDGE_RATIO = 10  # one request beside another for so many others
HEDGE_BURST = 100  # so many at once after a time without
HEDGE_RATE = 10  # so many per second in any case


class Budget:
    """Bounds requests that are sent beside others which may still be answered. Any number of threads may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._debt = 0.0
        self._filled = clock()

    def earn(self) -> None:
        """A request was sent that is not beside another."""
        with self._lock:
            self._debt = max(0.0, self._debt - 1)

    def spend(self) -> bool:
        """Whether another may be sent beside a request."""
        with self._lock:
            now = self._clock()  # without it, callers that all wait for lost replies would wait until their deadlines
            self._debt = max(0.0, self._debt - (now - self._filled) * HEDGE_RATE * HEDGE_RATIO)
            self._filled = now
            if self._debt + HEDGE_RATIO > HEDGE_BURST * HEDGE_RATIO:
                return False
            self._debt += HEDGE_RATIO
            return True


class Retry:
    """A request that may be asked several times: when the next attempt is due, and when it has failed.

    While no attempt may be answered any more, `at` is when the next one is due. While one may, it is when another is
    due beside it, each time after twice as long.
    """

    def __init__(self, left: float, absent: float, once: bool) -> None:
        self.left = left
        self.bound = min(absent, left / 2)
        self.once = once
        self.pending = 0
        self.sent = 0
        self.unheard = 0  # of these, that have reached nobody
        self.at = 0.0
        self.slow = min(SLOW_AFTER, max(left / 4, NEVER_SLOW))
        self.pause = FIRST_PAUSE
        self.why = ""
        self.absent_since: float | None = None

    def sends(self, now: float) -> None:
        """An attempt is sent."""
        self.pending += 1
        self.sent += 1
        self.at = now + self.slow

    def late(self, now: float, allowed: bool) -> None:
        """The answer is late; another attempt beside it is allowed, or not."""
        self.at = now + self.slow
        if allowed:
            self.at, self.slow, self.why = now, 2 * self.slow, SLOW

    def failed(self, now: float, why: str, unsent: bool = False) -> None:
        """An attempt will not be answered, or was not even sent; none will, if the connection is lost."""
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
        """Nobody could answer for so long that nobody will."""
        if self.pending:
            return False
        if self.once and self.sent > self.unheard:
            return True
        return self.absent_since is not None and min(now, self.at) - self.absent_since >= self.bound
