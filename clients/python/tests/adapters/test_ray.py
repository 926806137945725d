"""The request router in Ray's own package, against a running indexer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from kvatlas import Client
from kvatlas.ray import KvatlasRouter

from ..live.conftest import PATIENCE, eventually

DEPLOYMENT = DeploymentID(name="llm")


def replica(worker: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(unique_id=worker, deployment_id=DEPLOYMENT))


def request(key: str, *args: Any, lora: str = "", **kwargs: Any) -> PendingRequest:
    return PendingRequest(args=list(args), kwargs=kwargs, metadata=RequestMetadata(
        request_id=key, internal_request_id=key, multiplexed_model_id=lora))


def router(url: str, **kwargs: Any) -> KvatlasRouter:
    """Returns a router, created like Ray creates routers from the configuration of a deployment."""
    config = RequestRouterConfig(request_router_class="kvatlas.ray:KvatlasRouter", request_router_kwargs={
        "urls": [url], "model": "m", "timeout": PATIENCE, "absent": PATIENCE, **kwargs})
    kind = config.get_request_router_class()
    assert kind is KvatlasRouter
    r = kind(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    r.initialize_state(**config.request_router_kwargs)
    return r


def test_replicas(world: Any) -> None:
    async def run() -> None:
        r = router(world["http"])
        replicas = [replica("w2"), replica("w1"), replica("w3"), replica("w4")]
        r._replicas = {x.replica_id: x for x in replicas}
        with Client(world["http"], timeout=PATIENCE, absent=PATIENCE) as client:

            async def under_way(worker: str, wanted: int) -> None:
                def so() -> bool:
                    return [x.active_requests for x in client.loads("m").models[0].ranks if x.worker == worker] == [wanted]

                await asyncio.to_thread(eventually, f"{worker} has {wanted} requests", so)

            for one in (
                request("tokens", request_token_ids=world["prompt"]),
                request("prompt", {"prompt": "warm"}),
                request("list", SimpleNamespace(prompt=world["prompt"], messages=None)),
                request("chat", SimpleNamespace(messages=[{"role": "user", "content": "warm"}], tools=None)),
            ):
                for _ in range(2):  # second choice after a full replica
                    groups = await r.choose_replicas(replicas, one)
                    assert [x.replica_id.unique_id for x in groups[0]] == ["w1"] and len(groups[1]) == 2
                    assert groups[0][0] not in groups[1]
                r.on_request_routed(one, replicas[1].replica_id, None)
                await under_way("w1", 1)
                r.on_request_completed(replicas[1].replica_id, one.metadata.internal_request_id)
                await under_way("w1", 0)
            elsewhere = request("elsewhere", request_token_ids=world["prompt"])
            await r.choose_replicas(replicas, elsewhere)
            r.on_request_routed(elsewhere, replicas[0].replica_id, None)
            await under_way("w1", 0)
            r.on_request_completed(replicas[0].replica_id, "elsewhere")

            # Requests with a cancellation after and during the choice.
            left = request("left", request_token_ids=world["prompt"])
            await r.choose_replicas(replicas, left)
            await under_way("w1", 1)
            left.future.cancel()
            await under_way("w1", 0)
            during = request("during", request_token_ids=world["prompt"])
            choice = asyncio.ensure_future(r.choose_replicas(replicas, during))
            await asyncio.sleep(0)
            during.future.cancel()
            await choice
            await under_way("w1", 0)
            assert not r._booked and not r._chooser._running

        # Without a choice, Ray uses the candidate with the shorter queue of two.
        dead = router(world["nobody"], absent=0.01)
        prefill = router(world["http"], role="prefill")  # these workers are aggregated
        for which, one in (
            (r, request("no prompt")), (r, None), (r, request("lora", lora="x", request_token_ids=world["prompt"])),
            (dead, request("no answer", request_token_ids=world["prompt"])),
            (prefill, request("prefill", request_token_ids=world["prompt"])),
        ):
            groups = await which.choose_replicas(replicas, one)
            assert len(groups) == 1 and len(groups[0]) == 2
        assert await r.choose_replicas([], request("without replicas")) == []
        assert await r.choose_replicas(replicas[1:2], request("one", request_token_ids=world["prompt"])) == [
            replicas[1:2]]
        r.on_request_completed(replicas[1].replica_id, "one")
        await r._chooser.close()
        await dead._chooser.close()
        await prefill._chooser.close()

    asyncio.run(run())


def test_failures(world: Any) -> None:
    """The router reports a failed replica, and chooses another worker for the request."""

    async def run() -> None:
        replicas = [replica("w2"), replica("w1")]
        workers = {x.replica_id.unique_id: x for x in replicas}
        for report, result in ("on_replica_actor_unavailable", "refused"), ("on_replica_actor_died", "broken"):
            r = router(world["http"])
            r._replicas = {x.replica_id: x for x in replicas}
            one = request(result, request_token_ids=world["prompt"])
            first = (await r.choose_replicas(replicas, one))[0][0]
            getattr(r, report)(first.replica_id)
            r.on_request_completed(first.replica_id, result)  # as Ray does after the failure
            second = (await r.choose_replicas(replicas, one))[0][0]
            assert {first.replica_id.unique_id, second.replica_id.unique_id} == set(workers)

            def reported(worker: str = first.replica_id.unique_id, wanted: str = result) -> bool:
                answer = httpx.get(world["http"] + "/v1/engine_load").json()
                return any(x["worker"] == worker and x["result"] == wanted for x in answer.get("results") or ())

            await asyncio.to_thread(eventually, f"the failure {result} is reported", reported)
            getattr(r, report)(second.replica_id)  # after failures of all workers, all stay allowed
            assert (await r.choose_replicas(replicas, one))[0][0] in replicas
            r.on_request_completed(second.replica_id, result)
            r._failed(ReplicaID(unique_id="unknown", deployment_id=DEPLOYMENT), "refused")
            assert not r._booked
            await r._chooser.close()

    asyncio.run(run())
