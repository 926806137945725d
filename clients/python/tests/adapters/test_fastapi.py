"""The router of docs/python-routers.md in FastAPI, against a running indexer. Only the workers are a stand-in."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx

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
    assert unknown.json()["by"] == "http://worker-1:8000/v1/chat/completions"
