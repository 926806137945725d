"""A peer on real libzmq for the tests of package zmtp.

usage: peer.py KIND OPTIONS, OPTIONS in JSON. It says {"endpoint": ...} on stdout once it is there, then answers each line of
JSON on stdin with one on stdout. It ends with its stdin.

options: bind or connect (an endpoint; tcp://127.0.0.1:* lets the system choose a port), hwm, ivl and timeout
(heartbeats, ms), security ("plain" or "curve": as a server), topics (of a SUB), identity (of a DEALER)
"""
import json
import struct
import sys
import threading

import zmq
import zmq.auth

kind, opt = sys.argv[1], json.loads(sys.argv[2])
context = zmq.Context()
sock = context.socket(getattr(zmq, kind))
sock.linger = opt.get("linger", -1)
sock.sndhwm = sock.rcvhwm = opt.get("hwm", 1000)
if opt.get("ivl"):
    sock.heartbeat_ivl = opt["ivl"]
    sock.heartbeat_timeout = opt["timeout"]
    sock.heartbeat_ttl = opt["timeout"]
if opt.get("security") == "plain":
    sock.plain_server = True
if opt.get("security") == "curve":
    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.curve_server = True
if "identity" in opt:
    sock.identity = opt["identity"].encode()
sock.ipv6 = "[" in opt.get("bind", opt.get("connect", ""))
if "bind" in opt:
    sock.bind(opt["bind"])
if "connect" in opt:
    sock.connect(opt["connect"])
for topic in opt.get("topics", []):
    sock.subscribe(topic.encode())


def say(**what):
    print(json.dumps(what), flush=True)


def numbered(i, size):
    """A payload of the given size that begins with its number."""
    return struct.pack(">Q", i) + b"x" * (size - 8)


def serve(line):
    op = line["op"]
    if op == "subscribed":  # XPUB: wait for so many subscriptions
        return {"topics": [sock.recv().hex() for _ in range(line["n"])]}
    if op == "send":
        sock.send_multipart([bytes.fromhex(f) for f in line["frames"]])
        return {}
    if op == "burst":  # [topic, number BE + padding] for n numbers
        topic = line.get("topic", "").encode()
        for i in range(line["first"], line["first"] + line["n"]):
            sock.send_multipart([topic, numbered(i, line["size"])])
        return {}
    if op == "recv":  # messages as they come
        return {"messages": [[f.hex() for f in sock.recv_multipart()] for _ in range(line["n"])]}
    if op == "count":  # n messages whose last frame begins with a number: are they in order?
        first = last = None
        broken = 0
        for _ in range(line["n"]):
            (i,) = struct.unpack_from(">Q", sock.recv_multipart()[-1])
            if last is not None and i != last + 1:
                broken += 1
            first, last = i if first is None else first, i
        return {"first": first, "last": last, "broken": broken}
    if op == "answer":  # ROUTER: one request, n numbered replies
        who, empty, ask = sock.recv_multipart()
        for i in range(line["n"]):
            sock.send_multipart([who, b"", numbered(i, line["size"])])
        sock.send_multipart([who, b"", b"end:" + ask])
        return {"who": who.hex()}
    if op == "sleep":  # libzmq's own thread goes on
        threading.Event().wait(line["ms"] / 1000)
        return {}
    raise ValueError(op)


say(endpoint=sock.last_endpoint.rstrip(b"\0").decode(), version=zmq.zmq_version())
for line in sys.stdin:
    say(**serve(json.loads(line)))
