"""Writes messages and hashes of an engine's own code as test data of pkg/events: event_goldens.py WHEEL. Prints a JSON object:

    payloads   four messages in hex, from the engine's own structs and encoder, with the fields of this version
    vectors    [{"of": text, "digests": [hex], "names": [text]}]: digests, and the names of blocks with these digests in events. Digests
               of a hash algorithm of vLLM, and page hashes of SGLang 0.5.12, are those of the tokens 1 to 8 in blocks of four.
               "any digest" of SGLang has fixed values
    lookahead  a message of a cache with a lookahead of a token, in versions with lookahead: {"payload": hex, "tokens": […], "digests": [hex]}

`go test ./integration -run Golden -update` writes pkg/events/testdata/golden.json from the output.
"""
import importlib
import json
import os
import sys
import types

import msgspec

from engine import REAL, Cache, Publisher
from wheel import open_wheel

DIGEST = b"\xab" * 32


def messages(package):
    first, third = (15760518052499183552, DIGEST) if package == "vllm" else (-3482352314437016571, 77)
    stored = dict(type="BlockStored", block_size=4)
    return [
        (1.5, [dict(stored, block_hashes=[first, 2], token_ids=list(range(1, 9)), medium="GPU", extra_keys=[None, None], group_idx=0, kv_cache_spec_kind="full_attention")]),
        (2.5, [dict(stored, block_hashes=[3], parent_block_hash=2, token_ids=[9, 10, 11, 12], lora_id=1, medium="GPU", lora_name="adapter-a", extra_keys=[["adapter-a"]]),
               dict(type="BlockRemoved", block_hashes=[3], medium="GPU")]),
        (3.5, [dict(stored, block_hashes=[third], token_ids=[1, 2, 3, 4], medium="CPU", extra_keys=[["tenant-a"]], cache_salt="tenant-a")]),
        (4.5, [dict(type="AllBlocksCleared")]),
    ]


def encode(events, ts, batch):
    message = events.KVEventBatch(ts=ts, events=batch)
    setattr(message, "data_parallel_rank" if hasattr(message, "data_parallel_rank") else "attn_dp_rank", 0)
    return msgspec.msgpack.Encoder().encode(message).hex()


def vllm_vectors():
    hashing, utils = importlib.import_module("vllm.utils.hashing"), importlib.import_module("vllm.v1.core.kv_cache_utils")
    for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        hash = getattr(hashing, algorithm, None)
        if hash is None:
            continue
        utils.init_none_hash(hash)
        digests, parent = [], None
        for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
            parent = utils.hash_block_tokens(hash, parent, tokens, None)
            digests.append(parent)
        yield dict(of=algorithm, digests=[bytes(d).hex() for d in digests], names=[str(utils.maybe_convert_block_hash(d)) for d in digests])


def sglang_vectors(wheel):
    utils = importlib.import_module("sglang.srt.mem_cache.utils")
    name = utils.hash_str_to_int64
    if isinstance(utils.get_hash_str, types.FunctionType) and wheel.startswith("sglang-0.5.12"):  # later versions hash in C++
        digests, parent = [], None
        for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
            parent = utils.get_hash_str(tokens, parent)
            digests.append(parent)
        yield dict(of="page hash", digests=digests, names=[str(name(d)) for d in digests])
    digests = [("%064x" % v) for v in (0, 1 << 192, 1 << 255, (1 << 256) - 1)]
    yield dict(of="any digest", digests=digests, names=[str(name(d)) for d in digests])


def lookahead(events):
    cache = Cache(dict(block_size=4, blocks=16, groups=["full"], lookahead=1))
    tokens = list(range(1, 11))
    cache.admit(dict(id="r", tokens=tokens))
    payload = encode(events, 5.5, cache.manager.take_events())
    return dict(payload=payload, tokens=tokens, digests=[bytes(h).hex() for h in cache.requests["r"].block_hashes])


def main():
    path = sys.argv[1]
    wheel = os.path.basename(path)
    package = "sglang" if wheel.startswith("sglang") else "vllm"
    open_wheel(path, REAL[package] + ["sglang.srt.mem_cache.utils"])
    events = importlib.import_module({"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}[package])
    maker = types.SimpleNamespace(events=events, defaults=Publisher.defaults)
    out = dict(payloads=[encode(events, ts, [Publisher.event(maker, e) for e in batch]) for ts, batch in messages(package)])
    out["vectors"] = list(vllm_vectors() if package == "vllm" else sglang_vectors(wheel))
    if "lookahead_token_ids" in events.BlockStored.__struct_fields__:
        out["lookahead"] = lookahead(events)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
