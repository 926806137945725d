"""Runs an engine's own event publisher, and optionally the engine's own cache manager, from the engine's wheel.

    engine.py '{"wheel": PATH, …}'

The protocol is that of publisher.py: a JSON object per line, commands on stdin and replies on stdout. The first reply has the
addresses of the sockets. Options:
    wheel        path of the wheel (required)
    topic        default ""
    endpoint, replay   addresses of the sockets; default tcp://127.0.0.1:* (the system selects a port). ipc://PATH also binds in every version
    buffer       number of batches kept for replay; default 10000
    cache        creates a cache manager of vLLM, or a cache of SGLang: {"block_size": N, "blocks": N, "groups": ["full", "swa:64",
                 "chunked:64", "mamba:align", "mamba:all"], "lookahead": L, "eagle": BOOL}. "swa:64@32" has blocks of 32 tokens, a
                 multiple of block_size. SGLang has no lookahead and no eagle, and a single group beside full attention before 0.5.23.
                 "lookahead" simulates a drafter that reads L tokens ahead, from 0.33 on. "eagle" simulates a drafter whose engine
                 computes the last block of a hit again. "offload": {…} adds vLLM's offloading connector (offload_cache.py).
                 "lmcache": {…} adds LMCache (lmcache_cache.py)

Commands:
    {"op": "batch", "events": [{"type": "BlockStored", …}]}     publishes events with the engine's fields. Fields that this version lacks
                            are omitted. Required fields without a value are null. Replies with "seq"
    {"op": "lose", "n": N}  discards the next N messages without an error for the engine
    {"op": "admit", "id": ID, "tokens": […], "lora": NAME, "lora_id": N, "salt": S, "media": [{"identifier", "offset", "length"}], "limit": N, "report": MODE}
                            starts a request, finds the cached tokens and computes at most N further tokens. Replies with "cached" and
                            "fits". "fits" is false without room, and no request remains. MODE is a request's kv_cache_report_mode
    {"op": "append", "id": ID, "tokens": […]}    computes the rest of the prompt and these tokens. "fits" is false without room, and the
                                                 request ends
    {"op": "free", "id": ID}                     ends the request
    {"op": "evict", "ids": N}                    vLLM: evicts the last N block ids from the prefix cache. SGLang: evicts about N/4 pages.
                                                 "can" is false in versions without eviction
    {"op": "transfers"}                          with "offload": completes all copies in flight
    {"op": "reset"}                              empties the prefix cache. "done" is false while requests run
    {"op": "lookup", "prompts": [{"tokens", "lora", "salt", "media"}]}
                            replies with the engine's count of cached tokens per prompt: "whole" is the credit of a request, "main" is the
                            hit of the group with full attention alone
    {"op": "stop"}
The script publishes the events of a cache command as a message after the command, like the scheduler after a step. "seq" is the
sequence of the newest message, or -1.
"""
import inspect
import json
import os
import sys
import time
import types

import lmcache_cache
import offload_cache
import sglang_cache
from wheel import StubModule, open_wheel

REAL = {
    "vllm": [
        "vllm.envs", "vllm.distributed.kv_events", "vllm.utils", "vllm.utils.hashing", "vllm.utils.math_utils", "vllm.utils.network_utils",
        "vllm.multimodal.utils", "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_coordinator", "vllm.v1.core.kv_cache_manager",
        "vllm.v1.core.kv_cache_metrics", "vllm.v1.core.kv_cache_utils", "vllm.v1.core.single_type_kv_cache_manager",
        "vllm.v1.hisparse.block_pool", "vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_layout", "vllm.v1.kv_cache_spec_registry",
        "vllm.v1.request", "vllm.v1.utils",
    ],
    "sglang": ["sglang.srt.disaggregation.kv_events", "sglang.srt.mem_cache.events", "sglang.srt.utils.network"],
}


class Lossy:
    """A socket that discards the next messages on request."""

    def __init__(self, socket):
        self.socket = socket
        self.lose = 0

    def send_multipart(self, frames):
        if self.lose > 0:
            self.lose -= 1
        else:
            self.socket.send_multipart(frames)

    def __getattr__(self, name):
        return getattr(self.socket, name)


class Publisher:
    def __init__(self, opt, package):
        import importlib

        self.events = importlib.import_module({"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}[package])
        # The publisher binds an endpoint with an asterisk. libzmq accepts an asterisk as the port.
        self.publisher = self.events.ZmqEventPublisher(
            0, endpoint=opt.get("endpoint", "tcp://127.0.0.1:*"), replay_endpoint=opt.get("replay", "tcp://127.0.0.1:*"), buffer_steps=opt.get("buffer", 10000), topic=opt.get("topic", ""))
        self.endpoint, self.replay = (s.last_endpoint.rstrip(b"\0").decode() for s in (self.publisher._pub, self.publisher._replay))
        self.publisher._pub = self.wire = Lossy(self.publisher._pub)
        self.seq = -1

    def event(self, fields):
        struct = getattr(self.events, fields["type"])
        wanted = [n for n in struct.__struct_fields__ if n in fields or n not in self.defaults(struct)]
        return struct(**{n: fields.get(n) for n in wanted})

    @staticmethod
    def defaults(struct):
        names = struct.__struct_fields__
        return names[len(names) - len(struct.__struct_defaults__):]

    def publish(self, events):
        self.publisher.publish(self.events.KVEventBatch(ts=time.time(), events=events))
        self.seq += 1


class Cache:
    """vLLM's cache manager, with the calls of the scheduler."""

    def __init__(self, opt):
        import vllm.utils.torch_utils

        vllm.utils.torch_utils.get_dtype_size = lambda dtype: 2
        from vllm.utils import hashing
        from vllm.v1.core import kv_cache_manager, kv_cache_utils
        from vllm.v1 import kv_cache_interface, request

        self.size = opt["block_size"]
        kv_cache_utils.init_none_hash(hashing.sha256)
        ahead = opt.get("lookahead", 0)
        self.aligned = False  # true: the engine keeps states at the ends of chunks, which are block boundaries
        self.full = next(i for i, text in enumerate(opt["groups"]) if text == "full")
        self.hasher = kv_cache_utils.get_request_block_hasher(self.size, hashing.sha256, *[ahead] * (ahead > 0))
        self.Request = request.Request
        groups = []
        self.unit = self.size  # the length of every hit is a multiple of unit
        for i, text in enumerate(opt["groups"]):
            text, _, block = text.partition("@")
            block = int(block or self.size)
            self.unit = max(self.unit, block)
            kind, _, window = text.partition(":")
            common = dict(block_size=block, num_kv_heads=1, head_size=8, dtype=None)
            if kind == "full":
                spec = self.construct(kv_cache_interface.FullAttentionSpec, common, use_mla=False)
            elif kind == "swa":
                spec = self.construct(kv_cache_interface.SlidingWindowSpec, common, use_mla=False, sliding_window=int(window))
            elif kind == "chunked":
                spec = self.construct(kv_cache_interface.ChunkedLocalAttentionSpec, common, use_mla=False, attention_chunk_size=int(window))
            elif kind == "mamba":
                self.aligned = self.aligned or window == "align"
                spec = self.construct(kv_cache_interface.MambaSpec, dict(block_size=block, shapes=((1,),), dtypes=(None,)), mamba_cache_mode=window)
            else:
                raise ValueError(f"no group {text!r}")
            groups.append(kv_cache_interface.KVCacheGroupSpec([f"layer{i}"], spec))
        config = self.construct(kv_cache_interface.KVCacheConfig, dict(num_blocks=opt["blocks"], kv_cache_tensors=[], kv_cache_groups=groups))
        self.manager = self.construct(
            kv_cache_manager.KVCacheManager, dict(kv_cache_config=config, max_model_len=1 << 16), scheduler_block_size=self.unit,
            hash_block_size=self.size, enable_caching=True, enable_kv_cache_events=True, log_stats=False,
            num_hash_lookahead_tokens=ahead, num_prefill_lookahead=ahead, use_eagle=opt.get("eagle", False))
        self.kv_cache_config = config
        self.pool = self.manager.block_pool
        self.groups = config.kv_cache_groups
        self.blocks = opt["blocks"]
        self.requests = {}
        self.count = 0

    @staticmethod
    def construct(what, required, **optional):
        has = inspect.signature(what).parameters
        return what(**required, **{k: v for k, v in optional.items() if k in has})

    def request(self, name, cmd, tokens, number=1, report=None):
        lora = cmd.get("lora")
        if lora:
            lora = types.SimpleNamespace(name=lora, lora_name=lora, lora_int_id=number, adapter_id=number, path=f"/adapters/{lora}", lora_path=f"/adapters/{lora}")
        params = types.SimpleNamespace(max_tokens=1 << 16, extra_args={"kv_cache_report_mode": report} if report else None, skip_reading_prefix_cache=None, prompt_logprobs=None, structured_outputs=None)
        media = [types.SimpleNamespace(identifier=m["identifier"], mm_position=types.SimpleNamespace(offset=m["offset"], length=m["length"])) for m in cmd.get("media") or []]
        return self.construct(self.Request, dict(
            request_id=name, mm_features=media, prompt_token_ids=tokens, sampling_params=params, pooling_params=None, lora_request=lora or None,
            cache_salt=cmd.get("salt") or None, block_hasher=self.hasher), eos_token_id=None)

    def admit(self, cmd):
        r = self.request(cmd["id"], cmd, cmd["tokens"], cmd.get("lora_id"), cmd.get("report"))
        blocks, cached = self.manager.get_computed_blocks(r)[:2]
        until = min(r.num_tokens, cached + (cmd.get("limit") or r.num_tokens))
        first = self.stops(cached, until)[0]
        self.step()
        if self.manager.allocate_slots(r, first - cached, cached, blocks) is None:
            self.manager.free(r)
            return {"cached": cached, "fits": False}
        r.num_computed_tokens = first
        self.requests[cmd["id"]] = r
        return {"cached": cached, "fits": first == until or self.compute(cmd, until)}

    def stops(self, computed, until):
        """Returns the ends of the scheduler's steps that compute tokens up to until. With aligned states, a step ends at the last whole block."""
        whole = until // self.unit * self.unit
        if self.aligned and computed < whole < until:
            return [whole, until]
        return [until]

    def step(self):
        if hasattr(self.manager, "new_step_starts"):
            self.manager.new_step_starts()

    def compute(self, cmd, until):
        """Computes the tokens of a request up to until. Without room, compute ends the request and returns False."""
        r = self.requests[cmd["id"]]
        for stop in self.stops(r.num_computed_tokens, until):
            self.step()
            if self.manager.allocate_slots(r, stop - r.num_computed_tokens) is None:
                self.free(cmd)
                return False
            r.num_computed_tokens = stop
        return True

    def append(self, cmd):
        r = self.requests[cmd["id"]]
        r.append_output_token_ids(cmd["tokens"])
        return {"fits": self.compute(cmd, r.num_tokens)}

    def free(self, cmd):
        self.manager.free(self.requests.pop(cmd["id"]))
        return {}

    def evict(self, cmd):
        if not hasattr(self.manager, "evict_blocks"):
            return {"can": False}
        self.manager.evict_blocks(set(range(max(1, self.blocks - cmd["ids"]), self.blocks)))
        return {"can": True}

    def take_events(self):
        return self.manager.take_events()

    def reset(self, cmd):
        return {"done": bool(self.manager.reset_prefix_cache())}

    def lookup(self, cmd):
        whole, main = [], []
        for p in cmd["prompts"]:
            # The request has an additional token, because an engine always computes the last token. No prompt contains the token. With
            # lookahead, the hash of the block before includes the token.
            r = self.request("lookup", p, p["tokens"] + [1 << 29])
            whole.append(self.manager.get_computed_blocks(r)[1])
            main.append(self.main(r))
        return {"whole": whole, "main": main}

    def main(self, r):
        """Returns the hit of the manager of the group with full attention, in tokens."""
        manager = self.manager.coordinator.single_type_managers[self.full]
        find = type(manager).find_longest_cache_hit
        given = dict(
            block_hashes=r.block_hashes, max_length=r.num_tokens - 1, kv_cache_group_ids=[self.full], block_pool=self.pool,
            kv_cache_spec=self.groups[self.full].kv_cache_spec, use_eagle=False, drop_eagle_block=False, alignment_tokens=self.size,
            block_size=self.size, hash_block_size=self.size)
        has = inspect.signature(find).parameters
        got = find(**{k: v for k, v in given.items() if k in has})
        while not isinstance(got, list):  # a tuple of groups; some versions return further values
            got = got[0]
        return len(got) * self.size


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def run(cmd, publisher, cache):
    op = cmd["op"]
    if op == "batch":
        publisher.publish([publisher.event(e) for e in cmd["events"]])
        return {"seq": publisher.seq}
    if op == "lose":
        publisher.wire.lose += cmd["n"]
        return {}
    if op == "stop":
        raise SystemExit
    if cache is None or op not in ("admit", "append", "free", "evict", "reset", "lookup", "transfers", "foreign", "restart"):
        raise ValueError(f"no command {op!r}")
    answer = getattr(cache, op)(cmd)
    if events := cache.take_events():
        publisher.publish(events)
    return {"seq": publisher.seq, **answer}


def main():
    opt = json.loads(sys.argv[1])
    package = "sglang" if os.path.basename(opt["wheel"]).startswith("sglang") else "vllm"
    if package == "sglang" and opt.get("cache"):
        sglang_cache.torch_stand_in(StubModule)
        sglang_cache.native_hash_stand_in()
        open_wheel(opt["wheel"], REAL[package] + sglang_cache.real(opt["wheel"]))
        publisher, cache = Publisher(opt, package), sglang_cache.Cache(opt["cache"])
    else:
        offloads = bool(opt.get("cache") and opt["cache"].get("offload"))
        open_wheel(opt["wheel"], REAL[package] + offload_cache.REAL * offloads)
        publisher = Publisher(opt, package)
        cache = None
        if opt.get("cache"):
            make = offload_cache.make if offloads else lmcache_cache.make if opt["cache"].get("lmcache") else lambda base, opt: base(opt)
            cache = make(Cache, opt["cache"])
    say(ok=True, endpoint=publisher.endpoint, replay=publisher.replay)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line), publisher, cache)
        except Exception as err:  # the test reports every error
            say(ok=False, error=f"{type(err).__name__}: {err}")
        else:
            say(ok=True, **answer)


if __name__ == "__main__":
    main()
