"""The routing strategy in LiteLLM's own router, against a running indexer."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

from kvatlas import Client
from kvatlas.litellm import KvatlasRouting

from ..live.conftest import PATIENCE, eventually

CHAT = [{"role": "user", "content": "warm"}]


def deployment(worker: str, says: str) -> dict[str, Any]:
    return {"model_name": "llama", "model_info": {"id": worker}, "litellm_params": {
        "model": "openai/llama", "api_base": "http://127.0.0.1:9", "api_key": "none", "mock_response": says}}


def test_deployments(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        router = litellm.Router(num_retries=0, model_list=[deployment("w2", "w2"), deployment("w1", "w1")])
        routing = KvatlasRouting(router, world["http"], models={"llama": "m"}, timeout=PATIENCE, absent=PATIENCE)
        routing.install()
        ended: list[str] = []
        end = routing._chooser.end

        def ends(model: str, key: str) -> None:
            ended.append(key)
            end(model, key)

        monkeypatch.setattr(routing._chooser, "end", ends)

        def idle() -> bool:
            with Client(world["http"], timeout=PATIENCE, absent=PATIENCE) as client:
                return all(r.active_requests == 0 for r in client.loads("m").models[0].ranks)

        async def all_end(count: int) -> None:
            await asyncio.to_thread(eventually, f"{count} requests have ended", lambda: len(ended) >= count and idle())
            assert len(set(ended)) == len(ended) == count

        for n in range(1, 4):
            reply = await router.acompletion("llama", messages=CHAT)
            assert reply.choices[0].message.content == "w1"
            await all_end(n)
        said = ""
        async for chunk in await router.acompletion("llama", messages=CHAT, stream=True):
            said += chunk.choices[0].delta.content or ""
        assert said == "w1"
        await all_end(4)
        with pytest.raises(litellm.exceptions.InternalServerError):
            await router.acompletion("llama", messages=CHAT, mock_response="litellm.InternalServerError")
        await all_end(5)
        assert (await router.atext_completion("llama", prompt=world["prompt"])).choices[0].text
        await all_end(6)
        await routing.close()

        # While kvatlas is away, LiteLLM routes as it would without.
        away = KvatlasRouting(router, world["nobody"], timeout=PATIENCE, absent=0.01)
        away.install()
        assert (await router.acompletion("llama", messages=CHAT)).choices[0].message.content in ("w1", "w2")
        await away.close()

    asyncio.run(run())
