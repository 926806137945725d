"""The routing strategy in LiteLLM's router, against a running indexer."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import httpx
import litellm
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

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

        def ends(model: str, key: str, result: Any = None) -> None:
            ended.append(key)
            end(model, key, result)

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

        # While no indexer runs, LiteLLM uses the configured strategy.
        away = KvatlasRouting(router, world["nobody"], timeout=PATIENCE, absent=0.01)
        away.install()
        assert (await router.acompletion("llama", messages=CHAT)).choices[0].message.content in ("w1", "w2")
        await away.close()

    asyncio.run(run())


@contextlib.contextmanager
def engine() -> Iterator[tuple[int, threading.Event]]:
    """Runs an engine on a port. Whole answers wait for the event. A stream has a chunk before and after the event."""
    go = threading.Event()

    class Engine(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            stream = json.loads(self.rfile.read(int(self.headers["Content-Length"]))).get("stream")
            choice = {"index": 0, "text": "x", "finish_reason": None if stream else "stop",
                      "delta" if stream else "message": {"role": "assistant", "content": "x"}}
            reply = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})
            with contextlib.suppress(OSError):  # the client has left
                if not stream:
                    go.wait(PATIENCE)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
                self.end_headers()
                self.wfile.write((f"data: {reply}\n\n" if stream else reply).encode())
                if stream:
                    go.wait(PATIENCE)
                    self.wfile.write(f"data: {reply}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, go
    finally:
        go.set()
        server.shutdown()
        server.server_close()


def real_router(world: Any, port: int) -> litellm.Router:
    """Returns a router with two workers of a separate model, because failures change later choices."""
    for worker in ("slow-1", "slow-2"):
        httpx.post(f"{world['http']}/v1/workers", timeout=PATIENCE, json={
            "instance": worker, "model": "slow", "block_size": 16, "endpoint": f"http://127.0.0.1:{port}",
            "events": "none"}).raise_for_status()
    return litellm.Router(num_retries=0, model_list=[
        {"model_name": "slow", "model_info": {"id": worker}, "litellm_params": {
            "model": "hosted_vllm/slow", "api_base": f"http://127.0.0.1:{port}/v1", "api_key": "none"}}
        for worker in ("slow-1", "slow-2")])


async def under_way(world: Any, wanted: int) -> None:
    """Waits until the wanted number of requests of the model slow count as load."""

    def so() -> bool:
        with Client(world["http"], timeout=PATIENCE, absent=PATIENCE) as client:
            return sum(r.active_requests for r in client.loads("slow").models[0].ranks) == wanted

    await asyncio.to_thread(eventually, f"{wanted} requests count", so)


def test_abandoned_requests_are_freed(world: Any) -> None:
    """A request counts as load until the end: cancelled, timed out, closed, garbage-collected, or without a client."""

    async def run(port: int, go: threading.Event) -> None:
        router = real_router(world, port)
        routing = KvatlasRouting(router, world["http"], timeout=PATIENCE, absent=PATIENCE)
        routing.install()

        async def stream() -> Any:
            return await router.acompletion("slow", messages=CHAT, stream=True)

        async def whole() -> Any:
            return await router.acompletion("slow", messages=CHAT)

        async def task_cancelled() -> None:
            task = asyncio.ensure_future(whole())
            await under_way(world, 1)
            task.cancel()

        async def scope_cancelled() -> None:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(whole)
                    await under_way(world, 1)
                    scope.cancel()

        async def timed_out() -> None:
            with pytest.raises(litellm.Timeout):
                await router.acompletion("slow", messages=CHAT, timeout=0.2)

        async def waited_for() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(whole(), 0.2)

        async def closed() -> None:
            chunks = await stream()
            assert isinstance(chunks, litellm.CustomStreamWrapper)
            await chunks.__anext__()
            await under_way(world, 1)
            await chunks.aclose()

        async def collected() -> None:
            chunks = await stream()
            async for _ in chunks:
                break
            await under_way(world, 1)

        async def never_read() -> None:
            await stream()

        async def text_collected() -> None:
            chunks: Any = await router.atext_completion("slow", prompt="warm", stream=True)
            await chunks.__anext__()
            await under_way(world, 1)

        async def reader(pause: float) -> None:
            async for _ in await stream():
                await asyncio.sleep(pause)

        async def reader_cancelled(pause: float) -> None:
            task = asyncio.ensure_future(reader(pause))
            await under_way(world, 1)
            task.cancel()
            await asyncio.wait([task])

        async def reader_timed_out() -> None:
            with anyio.move_on_after(1):
                await reader(0)

        async def client_left() -> None:
            app = FastAPI()

            async def answer() -> StreamingResponse:
                chunks = await stream()

                async def lines() -> AsyncIterator[str]:
                    async for chunk in chunks:
                        yield chunk.model_dump_json() + "\n"

                return StreamingResponse(lines())

            app.get("/")(answer)
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
            serving = asyncio.ensure_future(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            url = "http://127.0.0.1:%d" % server.servers[0].sockets[0].getsockname()[1]
            async with httpx.AsyncClient() as http_client, http_client.stream("GET", url) as reply:
                lines = reply.aiter_lines()
                await lines.__anext__()
                await under_way(world, 1)
            await under_way(world, 0)
            server.should_exit = True
            await serving

        ways: tuple[Callable[[], Awaitable[None]], ...] = (
            task_cancelled, scope_cancelled, timed_out, waited_for, closed, collected, never_read, text_collected,
            lambda: reader_cancelled(0), lambda: reader_cancelled(PATIENCE), reader_timed_out, client_left)
        for way in ways:
            await way()
            await under_way(world, 0)
        go.set()
        await reader(0)
        await whole()
        await under_way(world, 0)
        assert not routing._chooser._running
        await routing.close()

    with engine() as (port, go):
        asyncio.run(run(port, go))


def test_progress_of_running_requests(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter reports the first token of a stream, and progress while the stream is open."""

    async def run(port: int, go: threading.Event) -> None:
        router = real_router(world, port)
        routing = KvatlasRouting(router, world["http"], timeout=PATIENCE, progress=0.05, absent=PATIENCE)
        routing.install()
        sent: list[str] = []
        client = routing._chooser._client
        for name in ("prefill_complete", "progress", "free"):
            def report(*args: Any, of: Any = getattr(client, name), name: str = name, **kwargs: Any) -> Any:
                sent.append(name)
                return of(*args, **kwargs)

            report.__name__ = name
            monkeypatch.setattr(client, name, report)
        chunks: Any = await router.acompletion("slow", messages=CHAT, stream=True)
        await chunks.__anext__()
        while sent.count("progress") < 3:
            await asyncio.sleep(0.01)
        await chunks.aclose()
        await routing.close()
        assert sent[0] == "prefill_complete" and sent[-1] == "free" and sent.count("free") == 1, sent

    with engine() as (port, go):
        asyncio.run(run(port, go))


def test_agent_calls_count(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of OpenAI's Responses and Anthropic's Messages send all fields in the choice, and count until the end."""

    async def run(port: int) -> None:
        router = real_router(world, port)
        routing = KvatlasRouting(router, world["http"], timeout=PATIENCE, absent=PATIENCE)
        routing.install()
        asked: list[Any] = []
        client = routing._chooser._client
        select = client.select

        async def selects(request: Any) -> Any:
            asked.append(request)
            return await select(request)

        monkeypatch.setattr(client, "select", selects)
        agents: Any = router
        calls: tuple[Callable[[], Awaitable[Any]], ...] = (
            lambda: agents.aresponses(model="slow", input="warm", instructions="short"),
            lambda: agents.anthropic_messages(model="slow", messages=CHAT, max_tokens=5))
        for call in calls:
            task = asyncio.ensure_future(call())
            counts = asyncio.ensure_future(under_way(world, 1))
            await asyncio.wait([task, counts], return_when=asyncio.FIRST_COMPLETED)
            assert not task.done(), task
            await counts
            task.cancel()
            await asyncio.wait([task])
            await under_way(world, 0)
        await routing.close()
        assert asked[0].api == "responses", asked[0]
        assert (asked[0].request["input"], asked[0].request["instructions"]) == ("warm", "short"), asked[0]
        assert asked[1].request["messages"] == CHAT, asked[1]
        assert len(asked) == 2

    with engine() as (port, _):
        asyncio.run(run(port))
