"""The script of docs/python-routers.md with stand-ins for production-stack's modules, against a running indexer."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ..live.conftest import PATIENCE

PAGE = Path(__file__).parents[4] / "docs" / "python-routers.md"


def test_the_script(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class PrefixAwareRouter:
        async def route_request(self, endpoints: Any, engine_stats: Any, request_stats: Any, request: Any,
                                request_json: Any) -> str:
            return "shipped"

    routes: list[str] = []

    async def run() -> None:
        engines = [SimpleNamespace(url="http://w2:8000"), SimpleNamespace(url="http://w1:8000")]
        chat = {"model": "m", "messages": [{"role": "user", "content": "warm"}]}
        for endpoints, body in (engines, chat), (engines, {"model": "m", "prompt": "warm"}), (engines[:1], chat), \
                (engines, {"model": "none", "prompt": "warm"}):
            routes.append(await PrefixAwareRouter().route_request(endpoints, {}, {}, None, body))

    modules: dict[str, dict[str, Any]] = {
        "vllm_router": {"app": SimpleNamespace(main=lambda: asyncio.run(run()))}, "vllm_router.routers": {},
        "vllm_router.routers.routing_logic": {"PrefixAwareRouter": PrefixAwareRouter},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    _, part = PAGE.read_text(encoding="utf-8").split("\n## vLLM production-stack\n")
    script = re.findall(r"(?s)\n```python\n(.*?)```", part)[0]
    script = script.replace("http://indexer:8090", world["http"]).replace("timeout=0.25", f"timeout={PATIENCE}")
    exec(compile(script, PAGE.name, "exec"), {})
    assert routes == ["http://w1:8000", "http://w1:8000", "shipped", "shipped"]
