"""Simulates engines that announce blocks at the full speed of the sockets: the load of the benchmark of the whole path.

    publisher.py '{"workers": 1, "blocks": 1310720}'

The script encodes all messages before the measurement, in the format of vLLM 0.24 (vllm-project/vllm, vllm/distributed/kv_events.py).
A message is a BlockStored with 64 blocks of 16 random tokens. A chain of 12 messages is a prompt. All blocks differ. The last message
of a worker is a single block. A reader that has applied this block has applied all blocks before.

The script reads commands from stdin, a JSON object per line, and replies with a line on stdout, like integration/python/publisher.py:
    {"op": "open"}          closes the sockets of the last "open", and binds a publisher and a replay socket per worker. Replies with
                            "engines": "endpoint" and "replay" per worker; "last": the tokens of the last block per worker; "samples":
                            some whole prompts with "worker" and "tokens"; "blocks": number of blocks in all messages
    {"op": "subscribers"}   blocks until every publisher has a subscriber, and then replies to replay requests with an empty past
    {"op": "send"}          sends all messages. Replies with "began" (Unix time of the first send in nanoseconds), and the time
                            "sending_s" and processor time "cpu_s" of the sends
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
    """The messages and sockets of an engine."""

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
            sock.sndhwm = 0  # unlimited: unread messages stay in the queue
            sock.linger = 0
            sock.bind("tcp://127.0.0.1:*")
        return {"endpoint": self.pub.last_endpoint.rstrip(b"\0").decode(), "replay": self.router.last_endpoint.rstrip(b"\0").decode()}

    def close(self):
        self.pub.close()
        self.router.close()


def settle(workers, seconds):
    """Replies to replay requests with only the end marker, for some seconds."""
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
            settle(workers, 1.5)  # a subscriber may send two replay requests
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
        except Exception as err:  # the benchmark reports every error
            say(ok=False, error=f"{type(err).__name__}: {err}")
        else:
            say(ok=True, **answer)


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


main()
