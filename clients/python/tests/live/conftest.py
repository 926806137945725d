"""Fixtures for tests against running indexers. integration/judges/python starts the indexers.

The environment variable KVATLAS_LIVE has the path of a JSON file with the addresses and the test data.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from kvatlas import AsyncClient, Client, errors

T = TypeVar("T")

PATIENCE = 240.0  # in seconds, for machines that pause


def live() -> Any:
    path = os.environ.get("KVATLAS_LIVE")
    assert path, "these tests need running indexers: go test -tags judges ./integration/judges/python"
    with open(path, encoding="utf-8") as f:
        return json.load(f)


@pytest.fixture(scope="session")
def world() -> Any:
    return live()


class Blocking:
    """Blocking wraps an AsyncClient in the methods of Client, so that a test covers both clients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = AsyncClient(*args, **kwargs)
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._loop.run_until_complete(method(*args, **kwargs))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(params=["http", "nats"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Client]]:
    """Returns a function that creates clients, and closes the clients after the test."""
    made: list[Any] = []

    def one(*args: Any, **kwargs: Any) -> Any:
        usual = {"timeout": PATIENCE, "absent": PATIENCE, **kwargs}
        made.append(Client(*args, **usual) if request.param == "sync" else Blocking(*args, **usual))
        return made[-1]

    yield one
    for client in made:
        client.close()


@pytest.fixture
def client(world: Any, transport: str, make: Callable[..., Client]) -> Client:
    """Returns a client of the first indexer. Tests run over HTTP and NATS, with both kinds of client."""
    return make(world[transport])


def patiently(call: Callable[[], T]) -> T:
    """Retries a call after a late answer, because the machine may pause."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except (errors.BehindError, errors.NotReadyError):
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def eventually(what: str, so: Callable[[], Any]) -> None:
    """Waits until the condition is true. The name of the condition is part of the error."""
    until = time.monotonic() + PATIENCE
    while not patiently(so):
        assert time.monotonic() < until, f"not true: {what}"
        time.sleep(0.02)
