"""The FastAPI routers of docs/python-routers.md, with stand-ins for workers. One router uses a running indexer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kvatlas import SelectRequest, errors

from ..live.conftest import PATIENCE
from .test_production_stack import PAGE


def test_the_router(world: Any) -> None:
    _, part = PAGE.read_text(encoding="utf-8").split("\n## FastAPI\n")
    script = re.findall(r"(?s)\n```python\n(.*?)```", part)[0]
    script = script.replace("http://indexer:8090", world["http"]).replace("timeout=0.25", f"timeout={PATIENCE}")
    router: dict[str, Any] = {}
    exec(compile(script, PAGE.name, "exec"), router)

    def work(request: httpx.Request) -> httpx.Response:
        return httpx.Response(201, json={"by": str(request.url), "body": request.content.decode()})

    async def run() -> list[httpx.Response]:
        router["workers"] = httpx.AsyncClient(transport=httpx.MockTransport(work))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router["app"]), base_url="http://router") as client:
            return [await client.post("/v1/chat/completions", json={
                "model": model, "messages": [{"role": "user", "content": "warm"}]}) for model in ("m", "none")]

    chosen, unknown = asyncio.run(run())
    assert chosen.status_code == 201
    assert chosen.json()["by"] == "http://w1:8000/v1/chat/completions"
    assert '"warm"' in chosen.json()["body"]
    assert re.fullmatch("http://worker-[12]:8000/v1/chat/completions", unknown.json()["by"])


class Choices:
    """Choices is a stand-in for the client of a router. It records reports, and raises the given failures first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.asked, self.reports = list(failures), list[SelectRequest](), list[tuple[Any, ...]]()

    async def select(self, request: SelectRequest) -> SimpleNamespace:
        self.asked.append(request)
        if self.failures:
            raise self.failures.pop(0)
        worker = next(w for w in ("worker-1", "worker-2") if w not in (request.excluded_workers or []))
        return SimpleNamespace(worker=worker, endpoint=f"http://{worker}:8000")

    async def prefill_complete(self, *request: str) -> None:
        self.reports.append(("first token", *request))

    async def free(self, *request: str, result: str | None = None) -> None:
        self.reports.append((result, *request))


async def stream() -> AsyncIterator[bytes]:
    yield b"by an engine"


def serve(kvatlas: Choices, *statuses: int) -> httpx.Response:
    """Returns the answer of the page's whole router. The engines reply with the statuses in turn."""
    _, part = PAGE.read_text(encoding="utf-8").split("\n## A router of your own\n")
    router: dict[str, Any] = {}
    exec(compile(re.findall(r"(?s)\n```python\n(.*?)```", part)[0], PAGE.name, "exec"), router)
    answers = [httpx.Response(status, content=stream()) for status in statuses]

    async def run() -> httpx.Response:
        router["kvatlas"], router["http"] = kvatlas, httpx.AsyncClient(
            transport=httpx.MockTransport(lambda request: answers.pop(0)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router["app"]), base_url="http://router") as client:
            answer = await client.post("/v1/completions", json={"model": "m", "prompt": "a"})
        await asyncio.sleep(0)  # for the reports
        return answer

    return asyncio.run(run())


def test_the_whole_router() -> None:
    kvatlas = Choices()
    assert serve(kvatlas, 500, 200).text == "by an engine"
    first, second = (r.request_id for r in kvatlas.asked)
    assert kvatlas.asked[1].excluded_workers == ["worker-1"] and first != second
    assert kvatlas.reports == [("status", "m", first), ("first token", "m", second), ("ok", "m", second)]


def test_the_whole_router_chooses_itself(caplog: pytest.LogCaptureFixture) -> None:
    kvatlas = Choices(errors.UnavailableError("no answer in time"))
    assert serve(kvatlas, 500, 200).is_success
    first = kvatlas.asked[0].request_id
    # the request may be booked on a worker that the router did not use
    assert [result for result, _, request_id in kvatlas.reports if request_id == first] == [None]
    assert "no answer in time" in caplog.text


@pytest.mark.parametrize("error, status", [
    (errors.NoWorkersError("why"), 503), (errors.OverloadedError("why"), 429), (errors.QuotaExceededError("why"), 429)])
def test_the_whole_router_refuses(error: Exception, status: int) -> None:
    assert serve(Choices(error)).status_code == status
