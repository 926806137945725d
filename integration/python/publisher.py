"""Publishes KV-cache events of a simulated engine on real libzmq: a publisher socket and a replay socket with scripted faults.

    publisher.py '{"form": "map", "block_size": 16}'

The script reads commands from stdin, a JSON object per line. Every reply on stdout is {"ok": true, ...} or
{"ok": false, "error": "..."}. A first reply comes before all commands: {"ok": true, "endpoint": "tcp://...",
"replay": "tcp://...", "next_seq": 0}. The script ends at "stop" and at the end of stdin.

The wire format is that of vLLM (vllm-project/vllm, vllm/distributed/kv_events.py). PUB sends [topic, sequence u64 BE from 0,
payload]. The payload is MessagePack [timestamp, events, rank]. A DEALER requests a replay with ["", first u64 BE]. The ROUTER
replies with all kept messages from that sequence on, as ["", topic, seq, payload] (before vLLM 0.25.1: ["", seq, payload]).
A message with seq -1 and an empty topic and payload ends the replay. The script ignores requests of another shape. A single
thread serves both sockets, as in vLLM, so a replay delays new messages.

Options, all optional:
    form          "map" (vLLM from 0.24.0 on; the default) or "array" (the older form, as in 0.23.0 with nils)
    replay_topic  true: replies contain the topic; default: true with "map", false with "array"
    endpoint      address of the publisher; default tcp://127.0.0.1:* (the system selects a port)
    connect       true: the publisher connects to endpoint, and the reader binds
    replay        address of the replay socket; default tcp://127.0.0.1:*
    no_replay     true: no replay socket
    socket        "XPUB" (default: a PUB that counts subscribers) or "PUB"
    topic         default ""
    rank          data_parallel_rank; default 0; null for none
    buffer        number of batches kept for replay; default 10000
    hwm           high-water mark of both sockets; default 100000
    heartbeat     {"ivl": ms, "timeout": ms}: ZMTP heartbeats; default none
    block_size    default 16
    seed          seed of the engine's hashes; default "0"
    hashes        "int" (default) or "bytes" (32-byte digests; replies have the last 8 bytes as an integer)
    first_seq     default 0; some simulators begin with 1

Commands that publish reply with "seq". "store", "remove" and "clear" also reply with "hashes".
    {"op": "store", "tokens": [..]}     BlockStored with the full blocks of tokens. Optional:
        "parent"      engine hash of the block before; default none
        "hashes"      engine hashes in place of computed hashes
        "medium"      default "GPU"; null for none
        "lora_id", "lora_name", "salt", "group", "kind", "window"     default none. The first block of a prompt has the salt
    {"op": "remove", "hashes": [..]}    BlockRemoved. Optional: "medium", "group"
    {"op": "clear"}                     AllBlocksCleared
    {"op": "batch", "events": [..]}     sends several events in a message; "hashes" has a list per event
    {"op": "burst", "n": N}             sends N messages that continue a prompt with ascending tokens. Optional: "blocks" per
                                        message (default 1), "first_token" (default 0), "parent". Replies with "first_seq",
                                        "last_seq", the number of "tokens", and "hashes"
    {"op": "raw", "payload": hex}       sends any payload with the next sequence. Optional: "topic"
    {"op": "frames", "frames": [hex]}   sends any frames without a sequence
    {"op": "drop", "n": N}              the next N messages are not sent but kept for replay: a gap. "keep": false: not kept
    {"op": "skip", "n": N}              skips N sequence numbers
    {"op": "forget", "keep": N}         deletes all but the last N messages from the replay buffer
    {"op": "replay_mode", "mode": M}    "answer" (default), "mute" (ignores requests), "endless" (no end marker)
    {"op": "restart"}                   begins a new incarnation: the first sequence, an empty replay buffer, new hashes. Closes the
                                        sockets and binds the same addresses again. "sockets": false keeps the sockets
    {"op": "subscribers", "n": N}       blocks until N subscriptions exist (XPUB only)
    {"op": "stats"}                     "next_seq", "subscribers", "replays" (number of requests), "kept"
    {"op": "stop"}
"""
import collections
import hashlib
import json
import os
import struct
import sys
import time

import msgspec
import zmq


class Map(msgspec.Struct, omit_defaults=True, tag=True):
    """An event of vLLM from 0.24.0 on."""


class Array(msgspec.Struct, omit_defaults=True, tag=True, array_like=True):
    """An event of vLLM before 0.24.0."""


STORED = [
    ("block_hashes", list), ("parent_block_hash", object), ("token_ids", list), ("block_size", int),
    ("lora_id", object), ("medium", object), ("lora_name", object),
    ("extra_keys", object, None), ("group_idx", object, None), ("kv_cache_spec_kind", object, None),
    ("kv_cache_spec_sliding_window", object, None),
]
REMOVED = [("block_hashes", list), ("medium", object), ("group_idx", object, None)]


def event_types(base):
    return {
        "store": msgspec.defstruct("BlockStored", STORED, bases=(base,), tag=True),
        "remove": msgspec.defstruct("BlockRemoved", REMOVED, bases=(base,), tag=True),
        "clear": msgspec.defstruct("AllBlocksCleared", [], bases=(base,), tag=True),
    }


class Engine:
    """An engine that names blocks and encodes events."""

    def __init__(self, opt):
        self.types = event_types({"map": Map, "array": Array}[opt.get("form", "map")])
        self.encoder = msgspec.msgpack.Encoder()
        self.block_size = opt.get("block_size", 16)
        self.seed = opt.get("seed", "0")
        self.as_bytes = opt.get("hashes", "int") == "bytes"
        self.rank = opt.get("rank", 0)
        self.life = 0
        self.digests = {}

    def restart(self):
        self.life += 1
        self.digests = {}

    def name(self, number):
        """Returns the hash on the wire for a number."""
        if not self.as_bytes or number is None:
            return number
        return self.digests.get(number, struct.pack(">24xQ", number))

    def chain(self, parent, tokens, extra):
        """Returns the names of consecutive full blocks. Readers must treat the names as opaque."""
        names = []
        for i in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = tokens[i : i + self.block_size]
            digest = hashlib.sha256(json.dumps([self.seed, self.life, parent, block, extra]).encode()).digest()
            parent = int.from_bytes(digest[-8:], "big")
            self.digests[parent] = digest
            names.append(parent)
        return names

    def event(self, cmd):
        """Returns the event of a command, and the hashes of the blocks in the event."""
        op = cmd["op"]
        if op == "clear":
            return self.types[op](), []
        medium, group = cmd.get("medium", "GPU"), cmd.get("group")
        if op == "remove":
            names = cmd["hashes"]
            return self.types[op]([self.name(n) for n in names], medium, group), names
        if op != "store":
            raise ValueError(f"{op!r} is no event")
        tokens, parent = cmd["tokens"], cmd.get("parent")
        lora, salt = cmd.get("lora_name"), cmd.get("salt")
        names = cmd.get("hashes") or self.chain(parent, tokens, [lora, salt])
        tokens = tokens[: len(tokens) // self.block_size * self.block_size]
        extra = []
        for i in range(len(names)):
            keys = [lora] if lora else []
            if salt and i == 0 and parent is None:
                keys.append(salt)
            extra.append(keys or None)
        return self.types[op](
            [self.name(n) for n in names], self.name(parent), tokens, self.block_size, cmd.get("lora_id"), medium, lora,
            extra, group, cmd.get("kind"), cmd.get("window"),
        ), names

    def batch(self, events):
        return self.encoder.encode([time.time(), events, self.rank])


def bind(sock, endpoint, patience=20):
    """Binds a socket. libzmq closes the socket of the previous incarnation asynchronously, so bind retries."""
    end = time.monotonic() + patience
    while True:
        try:
            return sock.bind(endpoint)
        except zmq.ZMQError as err:
            if err.errno != zmq.EADDRINUSE or time.monotonic() > end:
                raise
            time.sleep(0.002)


class Publisher:
    """A publisher with both sockets, the sequence and the replay buffer."""

    def __init__(self, opt, engine):
        self.opt = opt
        self.engine = engine
        self.context = zmq.Context()
        self.topic = opt.get("topic", "").encode()
        self.with_topic = opt.get("replay_topic", opt.get("form", "map") == "map")
        self.endpoint = opt.get("endpoint", "tcp://127.0.0.1:*")
        self.replay_endpoint = None if opt.get("no_replay") else opt.get("replay", "tcp://127.0.0.1:*")
        self.mode = "answer"
        self.replays = 0
        self.restart()

    def restart(self):
        self.seq = self.opt.get("first_seq", 0)
        self.kept = collections.deque(maxlen=self.opt.get("buffer", 10000))
        self.drops = []  # an entry per message to drop; true: the message is kept for replay

    def open(self):
        self.subscriptions = collections.Counter()
        self.kind = self.opt.get("socket", "XPUB")
        self.pub = self.socket(getattr(zmq, self.kind))
        if self.kind == "XPUB":
            self.pub.xpub_verboser = True
        if self.opt.get("connect"):
            self.pub.connect(self.endpoint)
        else:
            bind(self.pub, self.endpoint)
            self.endpoint = self.pub.last_endpoint.rstrip(b"\0").decode()
        self.router = None
        if self.replay_endpoint:
            self.router = self.socket(zmq.ROUTER)
            bind(self.router, self.replay_endpoint)
            self.replay_endpoint = self.router.last_endpoint.rstrip(b"\0").decode()
        self.poller = zmq.Poller()
        self.poller.register(0, zmq.POLLIN)
        if self.kind == "XPUB":
            self.poller.register(self.pub, zmq.POLLIN)
        if self.router:
            self.poller.register(self.router, zmq.POLLIN)

    def socket(self, kind):
        sock = self.context.socket(kind)
        sock.linger = 0
        sock.sndhwm = self.opt.get("hwm", 100000)
        if beat := self.opt.get("heartbeat"):
            sock.heartbeat_ivl, sock.heartbeat_timeout = beat["ivl"], beat["timeout"]
        return sock

    def close(self):
        self.pub.close()
        if self.router:
            self.router.close()

    def publish(self, payload, topic=None):
        topic = self.topic if topic is None else topic
        seq, self.seq = self.seq, self.seq + 1
        keep = True
        if self.drops:
            keep = self.drops.pop(0)
        else:
            self.pub.send_multipart([topic, struct.pack(">Q", seq), payload])
        if keep:
            self.kept.append((seq, topic, payload))
        return seq

    def serve(self, timeout=None):
        """Waits for input and serves the sockets. Returns true if stdin is readable."""
        ready = dict(self.poller.poll(timeout))
        if self.pub in ready:
            self.subscription(self.pub.recv())
        if self.router in ready:
            self.replay(self.router.recv_multipart())
        return 0 in ready

    def subscription(self, message):
        self.subscriptions[message[1:]] += 1 if message[:1] == b"\x01" else -1

    def subscribers(self):
        return sum(n for n in self.subscriptions.values() if n > 0)

    def replay(self, request):
        self.replays += 1
        if self.mode == "mute" or len(request) != 3 or request[1] != b"" or len(request[2]) != 8:
            return
        (first,) = struct.unpack(">Q", request[2])
        for seq, topic, payload in self.kept:
            if seq >= first:
                self.reply(request[0], topic, struct.pack(">Q", seq), payload)
        if self.mode != "endless":
            self.reply(request[0], b"", b"\xff" * 8, b"")

    def reply(self, who, topic, seq, payload):
        self.router.send_multipart([who, b"", topic, seq, payload] if self.with_topic else [who, b"", seq, payload])


def run(cmd, engine, publisher):
    op = cmd["op"]
    if op in ("store", "remove", "clear"):
        event, hashes = engine.event(cmd)
        return {"seq": publisher.publish(engine.batch([event])), "hashes": hashes}
    if op == "batch":
        made = [engine.event(e) for e in cmd["events"]]
        return {"seq": publisher.publish(engine.batch([e for e, _ in made])), "hashes": [h for _, h in made]}
    if op == "burst":
        size = cmd.get("blocks", 1) * engine.block_size
        token, parent, hashes, seqs = cmd.get("first_token", 0), cmd.get("parent"), [], []
        for _ in range(cmd["n"]):
            event, names = engine.event({"op": "store", "tokens": list(range(token, token + size)), "parent": parent})
            seqs.append(publisher.publish(engine.batch([event])))
            token, parent = token + size, names[-1]
            hashes += names
        return {"first_seq": seqs[0], "last_seq": seqs[-1], "tokens": size * cmd["n"], "hashes": hashes}
    if op == "raw":
        topic = cmd.get("topic")
        return {"seq": publisher.publish(bytes.fromhex(cmd["payload"]), topic if topic is None else topic.encode())}
    if op == "frames":
        publisher.pub.send_multipart([bytes.fromhex(f) for f in cmd["frames"]])
        return {}
    if op == "drop":
        publisher.drops += [cmd.get("keep", True)] * cmd["n"]
        return {}
    if op == "skip":
        publisher.seq += cmd["n"]
        return {}
    if op == "forget":
        publisher.kept = collections.deque(list(publisher.kept)[len(publisher.kept) - min(cmd["keep"], len(publisher.kept)) :], publisher.kept.maxlen)
        return {}
    if op == "replay_mode":
        if cmd["mode"] not in ("answer", "mute", "endless"):
            raise ValueError(f"no mode {cmd['mode']!r}")
        publisher.mode = cmd["mode"]
        return {}
    if op == "restart":
        publisher.restart()
        engine.restart()
        if cmd.get("sockets", True):
            publisher.close()
            publisher.open()
        return {"endpoint": publisher.endpoint, "replay": publisher.replay_endpoint}
    if op == "subscribers":
        if publisher.kind != "XPUB":
            raise ValueError("a PUB socket does not report subscribers")
        while publisher.subscribers() < cmd["n"]:
            if publisher.serve():
                raise SystemExit  # stdin has ended: the driver sends no command before a reply
        return {"subscribers": publisher.subscribers()}
    if op == "stats":
        publisher.serve(0)
        return {"next_seq": publisher.seq, "subscribers": publisher.subscribers(), "replays": publisher.replays, "kept": len(publisher.kept)}
    if op == "stop":
        raise SystemExit
    raise ValueError(f"no command {op!r}")


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main():
    opt = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    engine = Engine(opt)
    publisher = Publisher(opt, engine)
    publisher.open()
    say(ok=True, endpoint=publisher.endpoint, replay=publisher.replay_endpoint, next_seq=publisher.seq)
    pending = b""
    while True:
        if not publisher.serve():
            continue
        some = os.read(0, 1 << 20)
        if not some:
            return
        *lines, pending = (pending + some).split(b"\n")
        for line in lines:
            try:
                answer = run(json.loads(line), engine, publisher)
            except Exception as err:  # the driver reports every error
                say(ok=False, error=f"{type(err).__name__}: {err}")
            else:
                say(ok=True, **answer)


main()
