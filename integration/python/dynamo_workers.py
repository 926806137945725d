"""Runs a process of NVIDIA Dynamo's runtime with a publisher of KV-cache events per rank on the event plane.

    dynamo_workers.py '{"discovery": PATH, "block_size": N, "nats": URL}'

discovery is the folder of file discovery, or http://HOST:PORT of etcd. The event plane is NATS with a URL, and ZeroMQ without.
The protocol is that of publisher.py: a JSON object per line, commands on stdin and replies on stdout. The first reply has "worker",
the id of the process as a publisher.
    {"op": "open", "rank": R, "engine": "tcp://…"}   opens a publisher that reads events from an engine's ZeroMQ socket; without
                                                     "engine", from "stored" and "removed"
    {"op": "stored", "rank": R, "tokens": […], "blocks": […], "parent": H}
    {"op": "removed", "rank": R, "blocks": […]}
    {"op": "close", "rank": R}
    {"op": "router", "folder": PATH}   writes a model into the folder, serves the endpoint with the model, and starts Dynamo's router,
                                       which reports its requests to other routers
    {"op": "card", "folder": PATH, "role": "prefill"}   serves the endpoint as a worker of the role, without a router
    {"op": "route", "id": ID, "tokens": […]}   the router sends a request to a worker
    {"op": "prefilled", "id": ID}      marks the prefill of a request as complete
    {"op": "free", "id": ID}           ends a request
"""
import asyncio
import json
import os
import sys

options = json.loads(sys.argv[1])
etcd = options["discovery"].startswith("http")
os.environ["ETCD_ENDPOINTS" if etcd else "DYN_FILE_KV"] = options["discovery"]
os.environ.update(DYN_EVENT_PLANE_HOST="127.0.0.1", DYN_TCP_RPC_HOST="127.0.0.1")
if options.get("nats"):
    os.environ["NATS_SERVER"] = options["nats"]
os.environ.setdefault("DYN_LOG", "error")

from dynamo.llm import (  # noqa: E402: the import reads the environment
    KvEventPublisher, KvRouter, KvRouterConfig, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model)
from dynamo.runtime import DistributedRuntime  # noqa: E402


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def do(cmd, endpoint, publishers):
    op, rank, size = cmd["op"], cmd["rank"], options["block_size"]
    if op == "open":
        publishers[rank] = KvEventPublisher(
            endpoint, kv_block_size=size, dp_rank=rank, enable_local_indexer=True, zmq_endpoint=cmd.get("engine"))
    elif op == "stored":
        blocks = cmd["blocks"]
        publishers[rank].publish_stored(cmd["tokens"], [size] * len(blocks), blocks, cmd.get("parent"))
    elif op == "removed":
        publishers[rank].publish_removed(cmd["blocks"])
    elif op == "close":
        publishers.pop(rank).shutdown()
    else:
        raise ValueError(f"no command {op!r}")


async def handler(request):
    yield {"token_ids": [1], "finish_reason": "stop"}


async def register(endpoint, folder, **facts):
    asyncio.ensure_future(endpoint.serve_endpoint(handler))
    model = {"type": "WordLevel", "vocab": {"t0": 0, "t1": 1, "t2": 2}, "unk_token": "t0"}
    for name, content in {
            "tokenizer.json": {"version": "1.0", "added_tokens": [], "model": model},
            "config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
                            "vocab_size": 3, "bos_token_id": 1, "eos_token_id": 2}}.items():
        with open(os.path.join(folder, name), "w") as f:
            json.dump(content, f)
    await register_model(ModelInput.Tokens, endpoint=endpoint, model_path=folder, model_name="m",
                         kv_cache_block_size=options["block_size"], **facts)


async def start_card(endpoint, folder, role):
    config = ModelRuntimeConfig()
    config.total_kv_blocks, config.max_num_batched_tokens = 123, 456
    config.set_disaggregated_endpoint("127.0.0.1", 5678)
    prefill = role == "prefill"
    await register(endpoint, folder, model_type=ModelType.Prefill if prefill else ModelType.Chat, runtime_config=config,
                   worker_type=WorkerType.Prefill if prefill else WorkerType.Decode,
                   needs=[[WorkerType.Decode if prefill else WorkerType.Prefill]])


async def start_router(endpoint, folder):
    await register(endpoint, folder, model_type=ModelType.Chat, worker_type=WorkerType.Aggregated)
    return KvRouter(endpoint, options["block_size"], KvRouterConfig(router_replica_sync=True, use_kv_events=False))


async def route(cmd, endpoint, routers):
    if cmd["op"] == "router":
        routers.append(await start_router(endpoint, cmd["folder"]))
    elif cmd["op"] == "card":
        await start_card(endpoint, cmd["folder"], cmd["role"])
    elif cmd["op"] == "route":
        while True:  # until the router finds the worker
            try:
                return await routers[0].best_worker(cmd["tokens"], request_id=cmd["id"])
            except Exception as err:
                if "no endpoints" not in str(err):
                    raise
            await asyncio.sleep(0.05)
    elif cmd["op"] == "prefilled":
        await routers[0].mark_prefill_complete(cmd["id"])
    else:
        await routers[0].free(cmd["id"])


async def main():
    loop, publishers, routers = asyncio.get_running_loop(), {}, []
    plane = "nats" if options.get("nats") else "zmq"
    runtime = DistributedRuntime(loop, "etcd" if etcd else "file", "tcp", event_plane=plane)
    endpoint = runtime.endpoint("kvatlas.backend.generate")
    say(ok=True, worker=str(endpoint.connection_id()))
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            cmd = json.loads(line)
            if "rank" in cmd:
                do(cmd, endpoint, publishers)
            else:
                await route(cmd, endpoint, routers)
        except Exception as err:  # the test reports every error
            say(ok=False, error=f"{type(err).__name__}: {err}")
        else:
            say(ok=True)
    os._exit(0)


asyncio.run(main())
