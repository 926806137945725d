"""Clients over HTTP, with functions as servers."""

from __future__ import annotations

import array
import asyncio
import inspect
import json
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import httpx
import pytest

import kvatlas
from kvatlas import (
    AsyncClient, BookRequest, Client, MediaItem, Prompt, Query, RankPlace, SelectRequest, Target, errors,
)
from kvatlas._adapter import Chooser

PATIENCE = 240  # in seconds, for machines that pause

ANSWER = {
    "model": "llama", "block_size": 16, "blocks": 767, "complete": True, "news": "of a later version",
    "workers": [{"instance": "worker-1", "rank": 0, "device": 12, "host": 3, "disk": 0, "external": 0, "l3": 0,
                 "path": {"stop": "not_held", "held": [{"from": 0, "to": 15, "tiers": ["device"]}]}}],
    "partitions": [{"partition": 0, "epoch": "2026-11-21T08:00:00.123456789Z", "seq": 123}],
    "l3": {"status": "ok", "ranges": [[0, 4]], "total": 4, "age_ms": 1.5, "from_start": 4},
}

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler, *urls: str, **options: Any) -> Client:
    usual: dict[str, Any] = {"timeout": PATIENCE, "absent": PATIENCE, **options}
    return Client(urls or "http://indexer:8090", options={"transport": httpx.MockTransport(handler)}, **usual)


def failure(status: int, code: str, **more: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": "why", **more}})


def test_find() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json=ANSWER)

    with client(handler, token="secret") as c:
        answer = c.find(Query("llama", tokens=array.array("I", [1, 2, 3]), ranks=(RankPlace("w", 1),),
                              media=[MediaItem("cat", 0, 2)]))
    assert json.loads(seen[0].content) == {"model": "llama", "tokens": [1, 2, 3],
                                           "media": [{"hash": "cat", "offset": 0, "length": 2}],
                                           "ranks": [{"instance": "w", "rank": 1}]}
    assert (seen[0].method, seen[0].url.path) == ("POST", "/v1/find")
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert 1 <= int(seen[0].headers["kv-deadline-ms"]) <= 1000 * PATIENCE
    (worker,) = answer.workers
    assert (answer.blocks, worker.device, worker.total) == (767, 12, 15)
    assert worker.path and worker.path.held[0].end == 15
    assert answer.partitions[0].epoch.isoformat() == "2026-11-21T08:00:00.123456+00:00"
    assert answer.l3.ranges == ((0, 4),)
    with pytest.raises(AttributeError):
        answer.blocks = 1  # type: ignore[misc]


def test_regions() -> None:
    prefix = {"region": "us", "state": "partial", "reason": "why", "blocks": 290, "tokens": 4640, "price_ms": 80,
              "age_ms": 6100, "digest_blocks": 10, "held_blocks": 20, "false_positive_rate": 0.0039}

    def handler(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["regions"] is True
        return httpx.Response(200, json={**ANSWER, "regions": [{**prefix, "region": "eu", "local": True}, prefix]})

    with client(handler) as c:
        own, other = c.find(Query("llama", tokens=[1], regions=True)).regions
    assert (own.region, own.local, other.local) == ("eu", True, False)
    assert (other.blocks, other.price_ms, other.state, other.false_positive_rate) == (290, 80, "partial", 0.0039)


def test_requests_in_json() -> None:
    bodies: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return failure(409, "conflict")

    with client(handler) as c:
        for call in (
            lambda: c.select(SelectRequest("m", hashes=[2**64 - 1], request_id="r", book=True,
                                           pinned_worker=Target("w"), preferred_taints={"fast": 0.5},
                                           router_config_override=kvatlas.Overrides(assume_kv_reuse=False))),
            lambda: c.book(BookRequest("m", request_id="r", track_prefill_tokens=False)),
            lambda: c.select(SelectRequest("m", tokens=[1], excluded_workers=["w1", "w2"])),
            lambda: c.free("m", "r"),
            lambda: c.free("m", "r", result="timeout"),
            lambda: c.report_result("w", "refused"),
            lambda: c.output_block("m", "r", decay_fraction=0.0),
            lambda: c.potential_loads(Prompt("m", tokens=(1,), isl_tokens=1)),
            lambda: c.loads(),
        ):
            with pytest.raises(errors.ConflictError):
                call()
    assert bodies == [
        {"model": "m", "hashes": [18446744073709551615], "request_id": "r", "book": True,
         "pinned_worker": {"worker": "w"}, "preferred_taints": {"fast": 0.5},
         "router_config_override": {"assume_kv_reuse": False}},
        {"model": "m", "request_id": "r", "track_prefill_tokens": False},
        {"model": "m", "tokens": [1], "excluded_workers": ["w1", "w2"]},
        {"model": "m", "request_id": "r"},
        {"model": "m", "request_id": "r", "result": "timeout"},
        {"results": [{"worker": "w", "result": "refused"}]},
        {"model": "m", "request_id": "r", "decay_fraction": 0.0},
        {"model": "m", "tokens": [1], "isl_tokens": 1},
        {},
    ]


def test_fields_of_a_query_and_a_choice() -> None:
    bodies: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return failure(409, "conflict")

    with client(handler) as c:
        for call in (lambda: c.find(Query("m", tokens=[1], idle=True, deadline_ms=50)),
                     lambda: c.find(Query("m", tokens=[1])),
                     lambda: c.select(SelectRequest("m", tokens=[1], deadline_ms=50))):
            with pytest.raises(errors.ConflictError):
                call()
    assert bodies == [{"model": "m", "tokens": [1], "idle": True, "deadline_ms": 50}, {"model": "m", "tokens": [1]},
                      {"model": "m", "tokens": [1], "deadline_ms": 50}]


def test_sessions() -> None:
    asked: list[tuple[str, str, Any]] = []
    session = {"model": "m", "session_id": "chat-17", "worker": "w", "rank": 1, "last_use": "2026-11-21T08:00:00Z",
               "expires": "2026-11-21T08:10:00Z"}

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, json.loads(request.content)))
        return httpx.Response(200, json={
            "sessions": [session], "total": 3, "affinity": True, "missing": [7], "unknown_ranks": 2,
            "held": [{"model": "m", "worker": "w", "rank": 1, "blocks": 4, "device": 3, "host": 2, "disk": 1,
                      "external": 0}]})

    with client(handler) as c:
        list_ = c.sessions("m", "chat-17", limit=5, prompts=True)
        c.sessions()
        ended = c.end_session("chat-17", "m")
        c.end_session("chat-17")
    assert asked == [
        ("POST", "/v1/sessions", {"model": "m", "session_id": "chat-17", "limit": 5, "prompts": True}),
        ("POST", "/v1/sessions", {}),
        ("POST", "/v1/sessions/end", {"session_id": "chat-17", "model": "m"}),
        ("POST", "/v1/sessions/end", {"session_id": "chat-17"}),
    ]
    (first,), (held,) = list_.sessions, list_.held
    assert (first.session_id, first.worker, first.rank) == ("chat-17", "w", 1)
    assert (first.expires - first.last_use).total_seconds() == 600
    assert (list_.total, list_.affinity, list_.missing, list_.unknown_ranks) == (3, True, (7,), 2)
    assert (held.blocks, held.device, held.host, held.disk, held.external) == (4, 3, 2, 1, 0)
    assert ended.sessions[0].model == "m"


def test_errors_have_the_servers_codes() -> None:
    with client(lambda r: failure(404, "unknown_model", missing=[3])) as c:
        with pytest.raises(errors.UnknownModelError) as e:
            c.find(Query("none"))
    assert (e.value.code, e.value.message, e.value.missing) == ("unknown_model", "why", (3,))
    with client(lambda r: failure(418, "of_a_later_version")) as c:
        with pytest.raises(errors.KvatlasError) as later:
            c.find(Query("none"))
    assert type(later.value) is errors.KvatlasError and later.value.code == "of_a_later_version"
    for reply in httpx.Response(200, text="<html>"), httpx.Response(200, json={"model": "m"}), httpx.Response(404):
        with client(lambda r: reply) as c:
            with pytest.raises(errors.InternalError):
                c.find(Query("m"))
    with client(lambda r: httpx.Response(404)) as c:
        with pytest.raises(errors.InternalError, match="check the URL"):
            c.find(Query("m"))


def test_retry_at_the_next_node() -> None:
    asked: list[str] = []
    why: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "gone":
            raise httpx.ConnectError("refused", request=request)
        if request.url.host == "starting":
            return failure(503, "not_ready")
        return httpx.Response(200, json=ANSWER)

    urls = ["http://gone", "http://starting", "http://there"]
    with client(handler, *urls, asked_again=why.append) as c:
        for _ in range(3):
            c.find(Query("llama", tokens=[1]))
        assert set(asked) == {"gone", "starting", "there"} and set(why) == {"absent", "refused"}
        asked.clear()
        for _ in range(3):  # bookings are retried only if no node has received them
            try:
                c.select(SelectRequest("llama", request_id="r", book=True))
            except (errors.UnavailableError, errors.NotReadyError, errors.InternalError):
                pass
        assert sorted(asked) == ["gone", "starting", "starting", "there"]


def test_no_worker_may_be_chosen() -> None:
    """Other nodes give the same answer, so the client does not retry."""
    why: list[str] = []
    with client(lambda r: failure(503, "no_workers"), asked_again=why.append) as c:
        with pytest.raises(errors.NoWorkersError):
            c.select(SelectRequest("llama", tokens=[1]))
    assert why == []


def test_no_indexer() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with client(handler, absent=0.05) as c, pytest.raises(errors.UnavailableError, match="cannot be reached: refused"):
        c.find(Query("m"))


def test_hedged_request() -> None:
    async def run() -> None:
        never = asyncio.Event()
        why: list[str] = []
        first = True

        async def handler(request: httpx.Request) -> httpx.Response:
            nonlocal first
            if first:
                first = False
                await never.wait()
            return httpx.Response(200, json=ANSWER)

        async with AsyncClient("http://indexer", timeout=PATIENCE, asked_again=why.append,
                               options={"transport": httpx.MockTransport(handler)}) as c:
            assert (await c.find(Query("m"))).blocks == 767
        assert why == ["slow"]

    asyncio.run(run())


def test_timeout() -> None:
    async def run() -> None:
        async def handler(request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

        async with AsyncClient("http://indexer", options={"transport": httpx.MockTransport(handler)}) as c:
            with pytest.raises(errors.UnavailableError, match="no answer in time to find, requests sent: "):
                await c.find(Query("m"), timeout=0.05)
            with pytest.raises(errors.UnavailableError, match="no time is left"):
                await c.find(Query("m"), timeout=0)

    asyncio.run(run())


def test_pages_of_workers() -> None:
    info = {"model": "m", "block_size": 16, "partition": 0, "incarnation": 1, "last_event": 1,
            "last_seen": "2026-11-21T08:00:00Z", "pending": 0, "parked": 0, "copies": 0, "stored": 0, "removed": 0,
            "blocks": {"device": 1, "host": 0, "disk": 0, "external": 0}}

    def handler(request: httpx.Request) -> httpx.Response:
        after = json.loads(request.content).get("after")
        if after is None:
            return httpx.Response(200, json={"workers": [{"instance": "a", "rank": 0, **info}], "complete": False,
                                             "missing": [7], "next": {"instance": "a", "rank": 0}})
        assert after == {"instance": "a", "rank": 0}
        return httpx.Response(200, json={"workers": [{"instance": "b", "rank": 0, **info}], "complete": True})

    with client(handler) as c:
        list_ = c.workers()
    assert [w.instance for w in list_.workers] == ["a", "b"]
    assert (list_.complete, list_.missing) == (False, (7,))


def test_requests_of_several_threads() -> None:
    with client(lambda r: httpx.Response(200, json=ANSWER)) as c:
        answered: list[int] = []
        threads = [threading.Thread(target=lambda: answered.append(c.find(Query("m")).blocks)) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert answered == [767] * 8
    with pytest.raises(RuntimeError, match="closed"):
        c.find(Query("m"))
    c.close()


def test_request_in_a_forked_process() -> None:
    c = client(lambda r: httpx.Response(200, json=ANSWER))
    assert c.find(Query("m")).blocks == 767
    with warnings.catch_warnings():  # Python 3.12 and later warn about threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0 if c.find(Query("m")).blocks == 767 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    c.close()


def test_bad_arguments() -> None:
    for urls in "indexer:8090", "ftp://indexer", [], ["http://a", "nats://b"]:
        with pytest.raises(ValueError, match="not URLs"):
            Client(urls)
    with client(lambda r: httpx.Response(200, json=ANSWER)) as c, pytest.raises(TypeError, match="bytes"):
        c.find(Query("m", tokens=b"123"))


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, str]:
        return {name: str(inspect.signature(f)).partition(" ->")[0] for name, f in vars(kind).items()
                if inspect.isfunction(f) and (name == "__init__" or name[0] != "_")}

    assert methods(Client) == methods(AsyncClient)


def test_every_message_is_exported() -> None:
    from kvatlas import _messages

    own = {n for n, v in vars(_messages).items() if inspect.isclass(v) and v.__module__ == _messages.__name__}
    assert {n for n in own if n[0] != "_"} <= set(kvatlas.__all__)
    assert set(kvatlas.__all__) <= set(dir(kvatlas))
    assert set(errors.__all__) == {n for n, v in vars(errors).items()
                                   if inspect.isclass(v) and issubclass(v, errors.KvatlasError)} | {"error_of"}


def test_close_ends_requests_of_other_threads() -> None:
    asked = threading.Event()

    async def handler(request: httpx.Request) -> httpx.Response:
        asked.set()
        await asyncio.Event().wait()
        return httpx.Response(200)

    c = Client("http://there", timeout=3600, options={"transport": httpx.MockTransport(handler)})
    ended: list[BaseException] = []

    def find() -> None:
        try:
            c.find(Query("m"))
        except RuntimeError as e:
            ended.append(e)

    asker = threading.Thread(target=find)
    asker.start()
    asked.wait()
    c.close()
    asker.join()
    assert "closed" in str(ended[0])


def test_a_choice_without_an_answer_is_freed() -> None:
    """A request without an answer may be booked. The chooser works in several event loops, and raises no error."""
    asked: list[tuple[str, str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        said = json.loads(request.content)
        asked.append((request.url.path.rpartition("/")[2], said["request_id"]))
        if request.url.path.endswith("select"):
            raise httpx.ReadError("reset", request=request)
        return httpx.Response(200, json={"done": True})

    chooser = Chooser("http://there", 5.0, True, {"options": {"transport": httpx.MockTransport(handler)}})

    async def choose() -> None:
        assert await chooser.choose(model="m", tokens=[1]) is None
        while len(asked) % 2:
            await asyncio.sleep(0.001)

    for _ in range(2):
        asyncio.run(choose())
    assert [op for op, _ in asked] == ["select", "free", "select", "free"]
    assert asked[0][1] == asked[1][1] != asked[2][1] == asked[3][1]


def test_quota_exceeded() -> None:
    error = errors.error_of({"error": {"code": "quota_exceeded", "message": "the tenant has used its tokens",
                                       "quota": {"tenant": "x-team:batch", "retry_after_ms": 1500}}})
    assert isinstance(error, errors.QuotaExceededError)
    assert error.quota == {"tenant": "x-team:batch", "retry_after_ms": 1500}
