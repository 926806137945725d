"""Runs the code of engines for a shared store: vLLM's MooncakeStoreCoordinator, and SGLang's page hashes and object keys.

    hicache.py '{"wheel": "/path/of/a/wheel"}'

A line of stdin is a JSON list of questions. The script replies with a line on stdout, a JSON list with an answer per question.
Questions for vLLM:

    {"g": [[kind, block, window, eagle]..], "lcm": L, "hbs": H, "eagle": bool, "max": n, "present": ["0110"..]}
        A case as in pkg/hicache/testdata/coordinator-cases.jsonl. With "partial": true, a hit may end within a block. The answer is
        {"hit": n, "masks": ["01"..], "load": [..], "store": [..]}, or {"refused": "text"} after a failed assertion. "store" is for
        max rounded down to lcm. A mask of null means all blocks
    {"tokens": [..], "block": n, "algo": name, "seed": PYTHONHASHSEED or null, "lora": name or null, "salt": text or null, "lookahead": n}
        The answer is {"hashes": [hex..]}, the hashes of blocks from the request hasher
    {"g", "lcm", "hbs", "eagle", "partial": as above, "mla": [bool..], "prompt": a question of hashes, "there": [key..], "model", "prefix": text,
     "tp", "pp", "pcp", "dcp", "heads": n}
        For vLLM 0.24, or from 0.32 on. The answer is {"hit": tokens}, the hit of the prompt in a store with the keys

Questions for SGLang:

    {"tokens": [..], "page": n, "eagle": bool, "prior": hex or null}
        For versions with page hashes in Python. The answer is {"hashes": [hex..]}
    {"extra_key": text or null, "salt": text or null}
        For versions with namespaces. The answer is {"seed": hex or null}
    {"hash": hex, "tp": n, "pp": n, "mla": bool, "lcm": n or null, "split": bool, "tag": text or null, "model": text}
        The answer is {"keys": [..]}: all keys that the ranks of a worker look up in the store, pipeline ranks outermost
    {"page": n, "threshold": tokens, "pages": "0110.."}
        For versions before 0.5.18. The answer is {"loads": n, "asked": n}, in pages. The store has the pages with a 1. "loads" counts
        the pages that the controller loads, and "asked" counts the pages that the controller looks up
"""
import ast
import importlib
import json
import os
import queue
import sys
import threading
import types

import wheel


class Vllm:
    store = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store"

    def __init__(self, path):
        wheel.open_wheel(path, [
            "vllm.envs", "vllm.utils.math_utils", "vllm.utils.hashing", "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_coordinator",
            "vllm.v1.core.kv_cache_metrics", "vllm.v1.core.kv_cache_utils", "vllm.v1.core.single_type_kv_cache_manager",
            "vllm.v1.hisparse.block_pool", "vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_layout", "vllm.v1.kv_cache_spec_registry",
            "vllm.v1.request", "vllm.v1.utils", "vllm.distributed.kv_events", self.store + ".coordinator", self.store + ".data", self.store + ".worker", self.store + ".scheduler"])
        self.code = importlib.import_module(self.store + ".coordinator")
        self.specs = importlib.import_module("vllm.v1.kv_cache_interface")
        managers = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
        registry = importlib.import_module("vllm.v1.kv_cache_spec_registry")
        if not registry._REGISTRY_KVCACHESPEC_LIST:
            managers.register_all_kvcache_specs(None)

    def spec(self, kind, block, window, mla):
        s = self.specs
        heads = dict(block_size=block, num_kv_heads=1, head_size=8, dtype=None)
        if kind == "full":
            return (s.MLAAttentionSpec if mla else s.FullAttentionSpec)(**heads)
        if kind == "swa":
            return (s.SlidingWindowMLASpec if mla else s.SlidingWindowSpec)(sliding_window=window, **heads)
        if kind == "chunked":
            return s.ChunkedLocalAttentionSpec(attention_chunk_size=window, **heads)
        return s.MambaSpec(block_size=block, shapes=((1,),), dtypes=(None,))

    def group(self, kind, block, window, eagle, mla=False):
        group = self.specs.KVCacheGroupSpec(layer_names=["l"], kv_cache_spec=self.spec(kind, block, window, mla))
        group.is_eagle_group = bool(eagle)
        return group

    def pool(self, q, exists):
        pool = self.code.ExternalCachedBlockPool
        wants_unit = "hash_block_size" in pool.__init__.__code__.co_varnames
        return pool(q["hbs"], exists) if wants_unit else pool(exists)

    def hashes(self, q):
        os.environ.pop("PYTHONHASHSEED", None)
        if q["seed"] is not None:
            os.environ["PYTHONHASHSEED"] = q["seed"]
        function = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name(q["algo"])
        utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        utils.init_none_hash(function)
        request = types.SimpleNamespace(
            block_hashes=[], all_token_ids=q["tokens"], num_tokens=len(q["tokens"]), mm_features=[], prompt_embeds=None, cache_salt=q["salt"],
            lora_request=q["lora"] and types.SimpleNamespace(lora_name=q["lora"], lora_path="/adapters/" + q["lora"]))
        options = {"num_hash_lookahead_tokens": q["lookahead"]} if q["lookahead"] else {}
        hasher = utils.get_request_block_hasher(q["block"], function, **options)
        return {"hashes": [h.hex() for h in hasher(request)]}

    def lookup(self, q):
        worker, data = importlib.import_module(self.store + ".worker"), importlib.import_module(self.store + ".data")
        w = object.__new__(worker.MooncakeStoreWorker)
        w._kv_cache_groups = [self.group(*g, mla) for g, mla in zip(q["g"], q["mla"])]
        options = {"enable_partial_hash_hits": True} if q["partial"] else {}
        w.coord = self.code.MooncakeStoreCoordinator(w._kv_cache_groups, q["lcm"], q["hbs"], use_eagle=q["eagle"], **options)
        w.hash_block_size, w.tp_size, w.pp_size, w.pcp_size, w.dcp_size, w.num_kv_head = q["hbs"], q["tp"], q["pp"], q["pcp"], q["dcp"], q["heads"]
        there = set(q["there"])
        w.store = types.SimpleNamespace(batch_is_exist=lambda keys: [int(k in there) for k in keys])
        w._record_kv_connector_operation = lambda *a, **k: None
        metadata = lambda g: data.KeyMetadata(q["model"], 0, 0, 0, 0, group_id=g, cache_prefix=q["prefix"])
        hashes = [bytes.fromhex(h) for h in self.hashes(q["prompt"])["hashes"]]
        n = len(q["prompt"]["tokens"])
        if not hasattr(w, "_init_lookup_key_prefixes"):  # 0.24, where the scheduler computes a part of the hit
            if any(q["mla"]):
                w.num_kv_head = 1  # like the constructor for a model with MLA
            w.token_dbs = [types.SimpleNamespace(block_size=g[1], metadata=metadata(i)) for i, g in enumerate(q["g"])]
            scheduler = object.__new__(importlib.import_module(self.store + ".scheduler").MooncakeStoreScheduler)
            scheduler._block_size, scheduler.lookup_async, scheduler.load_async, scheduler.load_specs = q["lcm"], False, True, {}
            scheduler.client = types.SimpleNamespace(lookup=lambda name, tokens, hashes, non_block: w.lookup(tokens, hashes))
            request = types.SimpleNamespace(request_id="r", num_tokens=n, block_hashes=hashes)
            return {"hit": scheduler.get_num_new_matched_tokens(request, 0)[0]}
        w.token_dbs = [types.SimpleNamespace(block_size=g[1], store_layout=data.RankLocalStoreLayout(metadata(i), g[1], q["hbs"]))
                       for i, g in enumerate(q["g"])]
        w._capacity_only, w._tail_key_boundaries = False, lambda *a: ()
        w._group_tp_replication_factors = w._compute_group_tp_replication_factors()
        w._init_lookup_key_prefixes()
        return {"hit": w.lookup(n, hashes).hit_length}

    def answer(self, q):
        if "tokens" in q:
            return self.hashes(q)
        if "prompt" in q:
            return self.lookup(q)
        bits = lambda masks: [None if m is None else "".join("01"[bool(b)] for b in m) for m in masks]
        try:
            options = {"enable_partial_hash_hits": True} if q.get("partial") else {}
            coordinator = self.code.MooncakeStoreCoordinator([self.group(*g) for g in q["g"]], q["lcm"], q["hbs"], use_eagle=q["eagle"], **options)
            hashes = [i.to_bytes(8, "big") for i in range(len(q["present"][0]))]
            exists = {(g, h) for g, p in enumerate(q["present"]) for h, bit in zip(hashes, p) if bit == "1"}
            masks, hit = coordinator.find_longest_cache_hit(hashes, q["max"], self.pool(q, exists))
            return {"hit": hit, "masks": bits(masks), "load": bits(coordinator.load_mask(hashes, hit)),
                    "store": bits(coordinator.store_mask(q["max"] // q["lcm"] * q["lcm"]))}
        except AssertionError as e:
            return {"refused": str(e) or "an assertion"}


class Asked:
    """A store that records all requested keys and contains every key."""

    def __init__(self):
        self.keys = []

    def batch_is_exist(self, keys):
        self.keys += keys
        return [1] * len(keys)


class Sglang:
    base = "sglang.srt.mem_cache."
    controller = "sglang.srt.managers.cache_controller"

    def __init__(self, path):
        wheel.STUBBED.update({"mooncake", "numpy", "yaml", "orjson", "dill", "IPython", "zmq"})
        store = self.base + "storage.mooncake_store.mooncake_store"
        wheel.open_wheel(path, [self.base + "utils", store, self.controller])
        self.utils = importlib.import_module(self.base + "utils")
        self.store = importlib.import_module(store)
        self.endings = self.endings_in_init()

    def hashes(self, q):
        page, tokens, prior = q["page"], q["tokens"], q["prior"]
        units = [(a, b) for a, b in zip(tokens, tokens[1:])] if q["eagle"] else tokens
        out = []
        for first in range(0, len(units) - page + 1, page):
            prior = self.utils.get_hash_str(units[first:first + page], prior)
            out.append(prior)
        return {"hashes": out}

    def keys(self, q):
        asked = Asked()
        for pp in range(q["pp"]):
            for tp in range(q["tp"]):
                store = object.__new__(self.store.MooncakeStore)
                store.store, store.is_mla_backend, store.local_rank, store.pp_rank, store.pp_size = asked, q["mla"], tp, pp, q["pp"]
                store.extra_backend_tag = q["tag"]
                store.dcp_size = 1
                config = types.SimpleNamespace(model_name=q["model"], should_split_heads=q["split"], tp_lcm_size=q["lcm"], tp_size=q["tp"], tp_rank=tp,
                                               pp_rank=pp, pp_size=q["pp"], is_mla_model=q["mla"])
                exec(self.endings, {"self": store, "storage_config": config, "extra_config": {"extra_backend_tag": q["tag"]},
                                    "logger": wheel.Stub})
                store.batch_exists([q["hash"]])
                if q["mla"]:  # every rank looks up the same keys
                    break
        return {"keys": asked.keys}

    def endings_in_init(self):
        """Returns the lines of MooncakeStore.__init__ in the wheel that compute prefixes and suffixes of keys."""
        source = wheel.finder.wheel.read(wheel.finder.file(self.store.__name__)).decode()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Try):
                lines = [ast.unparse(n) for n in node.body]
                first = [i for i, line in enumerate(lines) if line.startswith("self.enable_pp =")]
                last = [i for i, line in enumerate(lines) if line.startswith("self.registered_pools")]
                prefix = [i for i, line in enumerate(lines) if line.startswith("self.config_prefix =")]
                check = [i for i, line in enumerate(lines) if line.startswith("if self.config.check_server")]
                if first and last:
                    return "\n".join((lines[prefix[0]:check[0]] if prefix else []) + lines[first[0]:last[0]])
        raise RuntimeError("MooncakeStore.__init__ does not compute the suffixes of keys in the expected place")

    def loads(self, q):
        """Runs the prefetch thread for a prompt, with the limits from the constructor."""
        code = importlib.import_module(self.controller)
        tensor = type("Tensor", (int,), {"item": lambda n: int(n)})
        code.torch = types.SimpleNamespace(tensor=lambda n, dtype: tensor(n), int=None, distributed=code.torch.distributed)
        c = object.__new__(code.HiCacheController)
        c.page_size, asked = q["page"], []
        source = ast.parse(wheel.finder.wheel.read(wheel.finder.file(self.controller)))
        limits = [ast.unparse(n) for n in ast.walk(source) if isinstance(n, ast.Assign)]
        for name in ("prefetch_threshold", "storage_batch_size"):
            exec(next(line for line in limits if line.startswith(f"self.{name} = ")), {"self": c, "prefetch_threshold": q["threshold"]})

        def batch_exists(hashes, info):
            bits = q["pages"][len(asked):len(asked) + len(hashes)]
            asked.extend(hashes)
            return (bits + "0").index("0")

        c.storage_backend = types.SimpleNamespace(batch_exists=batch_exists)
        c.get_hash_str, c.prefetch_io_aux_func = self.utils.get_hash_str, lambda: None
        c._all_reduce_prefetch_groups = c.append_host_mem_release = lambda *a: None
        c.prefetch_queue, c.prefetch_revoke_queue, c.storage_stop_event = queue.Queue(), queue.Queue(), threading.Event()
        c.storage_stop_event.set()  # ends the thread after the queue is empty
        tokens = len(q["pages"]) * q["page"]
        operation = types.SimpleNamespace(request_id="r", last_hash=None, token_ids=[7] * tokens, prefix_keys=None, host_indices=[0] * tokens, hash_value=[])
        c.prefetch_queue.put(operation)
        c.prefetch_thread_func()
        return {"loads": len(operation.hash_value) if c.prefetch_revoke_queue.empty() else 0, "asked": len(asked)}

    def answer(self, q):
        if "pages" in q:
            return self.loads(q)
        if "hash" in q:
            return self.keys(q)
        if "tokens" in q:
            return self.hashes(q)
        return {"seed": self.utils.storage_namespace_seed(q["extra_key"], q["salt"])}


def main():
    path = json.loads(sys.argv[1])["wheel"]
    engine = Sglang(path) if "sglang" in path.rsplit("/", 1)[-1] else Vllm(path)
    for line in sys.stdin:
        print(json.dumps([engine.answer(q) for q in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
