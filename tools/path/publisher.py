"""Engines that announce what they store as fast as their sockets take it: the load of the whole path's benchmark.

    publisher.py '{"workers": 1, "blocks": 1310720}'

All messages are encoded before anything is timed, in vLLM's format as of 0.24 (vllm-project/vllm, vllm/distributed/kv_events.py): a message is
one BlockStored of 64 blocks of 16 random tokens; 12 of them, each following the one before, make up a prompt. No two blocks are alike. The
last message of each worker is one block: when it is known, all before it are.

It reads commands from stdin, one JSON object a line, and answers each with one on stdout, as integration/python/publisher.py does:
    {"op": "open"}          binds a publisher and a replay socket for each worker, closing those of before. Answers "engines": for each
                            worker "endpoint" and "replay"; "last": the tokens of each worker's last block; "samples": some whole prompts,
                            each with its "worker" and "tokens"; "blocks": how many are announced
    {"op": "subscribers"}   waits until each publisher has a subscriber, which it tells what it wants to know of the past
    {"op": "send"}          sends all. Answers "began" (Unix time in nanoseconds at the first send), "sending_s" and the publisher's own "cpu_s"
                            until then
"""
import json
import random
import struct
import sys
import time

import msgspec
import zmq

BLOCKS, TOKENS, CHAIN = 64, 16, 12
VOCABULARY = 151_936

Stored = msgspec.defstruct(
    "BlockStored",
    [("block_hashes", list), ("parent_block_hash", object), ("token_ids", list), ("block_size", int), ("lora_id", object),
     ("medium", object), ("lora_name", object), ("extra_keys", object, None), ("group_idx", object, None), ("kv_cache_spec_kind", object, None)],
    tag=True, omit_defaults=True,
)
END = b"\xff" * 8


class Worker:
    """One engine's messages, and its sockets."""

    def __init__(self, number, messages, rng):
        encode = msgspec.msgpack.Encoder().encode
        self.frames, self.samples = [], []
        tokens, parent, prompt = range(VOCABULARY), None, []
        for seq in range(messages):
            if seq % CHAIN == 0:
                parent, prompt = None, []
            hashes = [rng.getrandbits(64) for _ in range(BLOCKS)]
            list_ = rng.choices(tokens, k=BLOCKS * TOKENS)
            prompt += list_
            if seq % CHAIN == CHAIN - 1 and (seq // CHAIN % (messages // CHAIN // 4 + 1) == 0 or seq + CHAIN >= messages):
                self.samples.append({"worker": number, "tokens": prompt})
            self.add(encode([time.time(), [Stored(hashes, parent, list_, TOKENS, None, "GPU", None, [None] * BLOCKS, 0, "full_attention")], 0]))
            parent = hashes[-1]
        self.last = [VOCABULARY + number] * TOKENS
        self.add(encode([time.time(), [Stored([rng.getrandbits(64)], None, self.last, TOKENS, None, "GPU", None, [None], 0, "full_attention")], 0]))

    def add(self, payload):
        self.frames.append((b"", struct.pack(">Q", len(self.frames)), payload))

    def open(self, context):
        self.pub, self.router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        for sock in (self.pub, self.router):
            sock.sndhwm = 0  # what is not taken waits: nothing is lost here
            sock.linger = 0
            sock.bind("tcp://127.0.0.1:*")
        return {"endpoint": self.pub.last_endpoint.rstrip(b"\0").decode(), "replay": self.router.last_endpoint.rstrip(b"\0").decode()}

    def close(self):
        self.pub.close()
        self.router.close()


def settle(workers, seconds):
    """Says for a while to whoever asks that there is no past."""
    poller = zmq.Poller()
    for w in workers:
        poller.register(w.router, zmq.POLLIN)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for router, _ in poller.poll(max(1, int(left * 1000))):
            who, *_ = router.recv_multipart()
            router.send_multipart([who, b"", b"", END, b""])


def main():
    opt = json.loads(sys.argv[1])
    each = opt["blocks"] // opt["workers"] // BLOCKS
    rng = random.Random(opt.get("seed", 1))
    context = zmq.Context()
    workers = [Worker(i, each, rng) for i in range(opt["workers"])]
    opened = []

    def run(op):
        if op == "open":
            for w in opened:
                w.close()
            opened[:] = workers
            return {"engines": [w.open(context) for w in workers], "last": [w.last for w in workers],
                    "samples": [s for w in workers for s in w.samples], "blocks": len(workers) * (each * BLOCKS + 1)}
        if op == "subscribers":
            for w in workers:
                w.pub.recv()
            settle(workers, 1.5)  # a subscriber may ask at once and once more
            return {}
        if op == "send":
            cpu, began = time.process_time(), time.time_ns()
            if len(workers) == 1:
                send = workers[0].pub.send_multipart
                for frames in workers[0].frames:
                    send(frames)
            else:
                sends = [w.pub.send_multipart for w in workers]
                for turn in zip(*(w.frames for w in workers)):
                    for send, frames in zip(sends, turn):
                        send(frames)
            return {"began": began, "sending_s": (time.time_ns() - began) / 1e9, "cpu_s": time.process_time() - cpu}
        raise ValueError(f"no command {op!r}")

    say(ok=True)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line)["op"])
        except Exception as err:  # whatever it is, the harness should hear of it
            say(ok=False, error=f"{type(err).__name__}: {err}")
        else:
            say(ok=True, **answer)


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


main()
