"""Sends requests to an index over gRPC like SGLang's router, with SGLang's own hashes and a client generated from a .proto file.

    kv_indexer_client.py '{"wheel": "/path/of/SGLang 0.5.12", "proto": "/path/of/kv_indexer.proto", "address": "HOST:PORT"}'

The script replies to every line of stdin, a JSON object, with a line on stdout. The commands and replies are:

    {"op": "hashes", "tokens": [..], "page": n}
        {"ok": true, "hashes": [..]}: the names of the whole blocks of a prompt in SGLang's events
    {"op": "match", "hashes": [..], "max_blocks": n, "timeout": seconds}
        {"ok": true, "code": "OK", "matches": [[address, blocks, id]..], "best": n, "read": n}, or only the code of an error
    {"op": "descriptor"}
        {"ok": true, "descriptor": base64}: the descriptor of the file
"""
import base64
import importlib
import json
import os
import sys
import tempfile

import grpc
from grpc_tools import protoc

import wheel


def compile(proto):
    folder, name = os.path.split(proto)
    out = tempfile.TemporaryDirectory()
    if protoc.main(["protoc", f"-I{folder}", f"--python_out={out.name}", f"--grpc_python_out={out.name}", name]) != 0:
        raise RuntimeError(f"{proto} cannot be compiled")
    sys.path.insert(0, out.name)
    base = name.removesuffix(".proto")
    return out, importlib.import_module(base + "_pb2"), importlib.import_module(base + "_pb2_grpc")


def main():
    opt = json.loads(sys.argv[1])
    folder, messages, services = compile(opt["proto"])
    wheel.open_wheel(opt["wheel"], ["sglang.srt.mem_cache.utils"])
    utils = importlib.import_module("sglang.srt.mem_cache.utils")
    stub = services.KVIndexerStub(grpc.insecure_channel(opt["address"]))

    def hashes(q):
        names, digest = [], None
        for at in range(0, len(q["tokens"]) // q["page"] * q["page"], q["page"]):
            digest = utils.get_hash_str(q["tokens"][at:at + q["page"]], digest)
            names.append(utils.hash_str_to_int64(digest))
        return {"hashes": names}

    def match(q):
        request = messages.MatchExternalKvPrefixRequest(hashes=q["hashes"], max_blocks=q.get("max_blocks", 0))
        try:
            a = stub.MatchExternalKvPrefix(request, timeout=q["timeout"])
        except grpc.RpcError as e:
            return {"code": e.code().name}
        return {"code": "OK", "matches": [[m.worker_address, m.matched_prefix_blocks, m.worker_id] for m in a.matches],
                "best": a.best_prefix_blocks, "read": a.blocks_read}

    def descriptor(_):
        return {"descriptor": base64.b64encode(messages.DESCRIPTOR.serialized_pb).decode()}

    do = {"hashes": hashes, "match": match, "descriptor": descriptor}
    for line in sys.stdin:
        q = json.loads(line)
        print(json.dumps({"ok": True, **do[q["op"]](q)}), flush=True)
    folder.cleanup()


main()
