"""A process of NVIDIA Dynamo's runtime with publishers of KV-cache events on its ZeroMQ event plane, one for each rank.

    dynamo_workers.py '{"discovery": PATH, "block_size": N}'

discovery is the folder of file discovery, or http://HOST:PORT of etcd. A line of JSON for each command on stdin and for each answer on stdout, as with publisher.py; the first
answer has "worker", the id under which the process publishes.
    {"op": "open", "rank": R, "engine": "tcp://…"}   a publisher that hears an engine's ZeroMQ socket; without an engine it is told events
    {"op": "stored", "rank": R, "tokens": […], "blocks": […], "parent": H}
    {"op": "removed", "rank": R, "blocks": […]}
    {"op": "close", "rank": R}
"""
import asyncio
import json
import os
import sys

options = json.loads(sys.argv[1])
etcd = options["discovery"].startswith("http")
os.environ["ETCD_ENDPOINTS" if etcd else "DYN_FILE_KV"] = options["discovery"]
os.environ.update(DYN_EVENT_PLANE_HOST="127.0.0.1", DYN_TCP_RPC_HOST="127.0.0.1")
os.environ.setdefault("DYN_LOG", "error")

from dynamo.llm import KvEventPublisher  # noqa: E402: it reads the environment
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


async def main():
    loop, publishers = asyncio.get_running_loop(), {}
    runtime = DistributedRuntime(loop, "etcd" if etcd else "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("kvatlas.backend.generate")
    say(ok=True, worker=str(endpoint.connection_id()))
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            do(json.loads(line), endpoint, publishers)
        except Exception as err:  # whatever it is, the test should hear of it
            say(ok=False, error=f"{type(err).__name__}: {err}")
        else:
            say(ok=True)
    os._exit(0)


asyncio.run(main())
