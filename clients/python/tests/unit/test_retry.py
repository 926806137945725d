"""Random requests with retries: an attempt is always pending or due soon, and the number of attempts is bounded."""

from __future__ import annotations

import random

from kvatlas._retry import ABSENT, HEDGE_BURST, HEDGE_RATE, HEDGE_RATIO, LONG_PAUSE, LOST, REFUSED, SLOW_AFTER, Budget, Retry


def test_steps() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        r = Retry(rng.randint(1, 10_000) / 1000, 2.0, False)
        failures = slow = 0
        now = 0.0
        while now < r.left and not r.over(now):
            assert r.at >= now, seed
            assert 0 <= r.pending <= 1 + slow, seed
            assert r.pending or r.at <= now + LONG_PAUSE, seed
            now = min(r.at, r.left)
            if now == r.left:
                break
            if r.pending:
                r.late(now, rng.random() < 0.75)
                if r.at > now:
                    continue
                slow += 1
            r.sends(now)
            while r.pending and rng.random() < 0.33:
                now += rng.randint(0, 4) / 1000
                failures += 1
                why = rng.choice([LOST, ABSENT, REFUSED])
                r.failed(now, why)
                assert r.pending or r.why == why
        assert 1 <= r.sent <= 1 + slow + failures, seed
        assert slow <= max(4.0, r.left / SLOW_AFTER).__ceil__().bit_length(), seed


def test_no_node_serves() -> None:
    for left, nobody in (10.0, 2.0), (1.0, 0.5):
        r = Retry(left, 2.0, False)
        now = 0.0
        while not r.over(now):
            r.sends(now)
            r.failed(now, ABSENT)
            now = r.at
        assert nobody <= now <= nobody + LONG_PAUSE


def test_once() -> None:
    r = Retry(1.0, 1.0, True)
    r.sends(0)
    r.late(r.at, False)
    assert r.at < r.left and not r.over(r.at)
    for why, unsent in (ABSENT, False), (LOST, True):
        r.failed(0.001, why, unsent)  # no node received the attempt
        assert not r.over(0.001)
        r.sends(0.001)
    r.failed(0.001, LOST)
    assert r.over(0.001)


def test_budget() -> None:
    now = 5.0
    b = Budget(lambda: now)
    assert sum(b.spend() for _ in range(1000)) == HEDGE_BURST
    for _ in range(10 * HEDGE_RATIO):
        b.earn()
    assert sum(b.spend() for _ in range(1000)) == 10
    for _ in range(3):
        now += 0.5  # no request
        assert sum(b.spend() for _ in range(1000)) == HEDGE_RATE // 2
    for _ in range(100_000):
        b.earn()
    assert sum(b.spend() for _ in range(1000)) == HEDGE_BURST
