"""Computes the loads of pages of several pools with SGLang's own Mooncake storage class, from a real master.

    hicache_pools.py '{"wheel": "/path/of/sglang.whl", "master": "HOST:PORT of its RPC"}'

A line of stdin is a JSON list of questions. The script replies with a line on stdout, a JSON list with an answer per question. A
question is

    {"tp": n, "pp": n, "mla": bool, "model": text, "tag": text, "page": tokens, "logical": bool, "hashes": [hex..], "own": pages,
     "pools": [{"pool": name, "trailing": pages or 0, "mla": bool, "there": [["0110.."..]..]}..]}

The engine has further pools beside the pool of keys and values. The latter is "kv" in the list, or logical, which means without
objects. "there" lists the objects to put into the store, per rank (pipeline ranks outermost) and page, with a digit per object. An
answer is {"layout": SGLang's description, "suffixes": {pool: [suffixes of all ranks..]}, "pages": number of pages that all ranks can load}.

The constructor of MooncakeStore runs for every rank, with a real client. All ranks share the client.
"""
import importlib
import json
import sys
import types

import wheel

BASE = "sglang.srt.mem_cache."


class Client:
    """A real client, shared by the stores of all ranks. The first setup is final."""
    real = None

    def __init__(self):
        if Client.real is None:
            from mooncake.store import MooncakeDistributedStore
            Client.real = MooncakeDistributedStore()

    def setup(self, hostname, *args, **kwargs):
        if not hasattr(Client, "ready"):
            Client.ready = Client.real.setup("localhost", *args, **kwargs)
        return Client.ready

    def __getattr__(self, name):
        return getattr(Client.real, name)


class Engine:
    def __init__(self, path, master):
        wheel.STUBBED.update({"numpy", "yaml", "orjson", "zmq", "msgspec"})
        names = [BASE + "hicache_storage", BASE + "storage.mooncake_store.mooncake_store"]
        wheel.open_wheel(path, names)
        self.storage, self.code = map(importlib.import_module, names)
        self.code.torch = types.SimpleNamespace(arange=lambda n, **_: range(n), int64=None, Tensor=object)
        self.code.MooncakeBaseStore._import_mooncake_store = lambda _: Client
        self.code.MooncakeBaseStore._import_mooncake_group_semantics = lambda _: (None, False)
        self.master = master
        self.mla_pool = type("MLAPool", (self.code.MLATokenToKVPoolHost,), {"__init__": lambda self: None})

    def store(self, q, tp, pp):
        extra = {"master_server_address": self.master, "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "device_name": "",
                 "local_hostname": "localhost", "global_segment_size": 512 << 20, "extra_backend_tag": q["tag"], "check_server": False,
                 "standalone_storage": False, "enable_ssd_offload": False, "ssd_offload_path": None, "tenant_id": "default",
                 "master_metrics_port": 9003, "client_server_address": ""}
        config = self.storage.HiCacheStorageConfig(
            tp_rank=tp, tp_size=q["tp"], pp_rank=pp, pp_size=q["pp"], attn_cp_rank=0, attn_cp_size=1, is_mla_model=q["mla"],
            enable_storage_metrics=False, is_page_first_layout=True, model_name=q["model"], extra_config=extra)
        store = self.code.MooncakeStore(config, None)
        per_page = 1 if q["mla"] else 2
        meta = lambda indices: ([0] * (len(indices) // q["page"] * per_page),) * 2
        store.mem_pool_host = types.SimpleNamespace(kv_buffer=None if q["logical"] else object(), page_size=q["page"],
                                                    get_page_buffer_meta=meta)
        for p in q["pools"]:
            if p["pool"] != "kv":
                pool = self.mla_pool() if p["mla"] else types.SimpleNamespace(v_buffer=0, conv_buffer=[0, 0])
                store.registered_pools[self.storage.PoolName(p["pool"])] = pool
        return store

    def transfer(self, p):
        policy = self.storage.PoolHitPolicy
        return self.storage.PoolTransfer(
            name=self.storage.PoolName(p["pool"]), keys=["placeholder"] * p["trailing"] or None,
            hit_policy=policy.TRAILING_PAGES if p["trailing"] else policy.ALL_PAGES)

    def keys(self, store, q, p, hashes):
        """Returns the keys of a pool's objects for a write."""
        if p["pool"] == "kv":
            return store._batch_preprocess(store._tag_keys(hashes), range(q["page"] * len(hashes)))[0]
        return store._tag_keys(store._get_hybrid_page_component_keys(hashes, self.transfer(p))[0])

    def describe(self, store, q):
        specs = [self.storage.SidecarPoolSpec(
            pool_name=self.storage.PoolName(p["pool"]), indices_from_pool=self.storage.PoolName.SWA,
            hit_policy=self.transfer(p).hit_policy) for p in q["pools"] if p["pool"] not in ("kv", "swa", "mamba")]
        window = max([p["trailing"] for p in q["pools"] if p["pool"] != "mamba"], default=0)
        return store.describe_l3_object_layout(sidecar_pool_specs=specs, swa_trailing_pages=window or None, page_size=q["page"])

    def answer(self, q):
        stores = [self.store(q, tp, pp) for pp in range(q["pp"]) for tp in range(q["tp"])]
        suffixes = {}
        for rank, store in enumerate(stores):
            for p in q["pools"]:
                ends = suffixes.setdefault(p["pool"], [])
                ends += [e for e in (k[len(store._tag_keys([""])[0]):] for k in self.keys(store, q, p, [""])) if e not in ends]
                for page, there in enumerate(p["there"][rank]):
                    for key, bit in zip(self.keys(store, q, p, [q["hashes"][page]]), there, strict=True):
                        if bit == "1" and (code := store.store.put(key, b"page")):
                            raise RuntimeError(f"put: {code}")
        transfers = [self.transfer(p) for p in q["pools"] if p["pool"] != "kv"]
        legal = None
        for store in stores:
            hit = store.batch_exists_v2(q["hashes"][q["own"]:], transfers)
            pages = set(hit.restorable_prefix_pages)
            legal = pages if legal is None else legal & pages
        layout = self.storage.merge_l3_layouts([self.describe(store, q) for store in stores])
        return {"layout": layout, "suffixes": suffixes, "pages": max(legal, default=0)}


def main():
    options = json.loads(sys.argv[1])
    engine = Engine(options["wheel"], options["master"])
    for line in sys.stdin:
        print("@" + json.dumps([engine.answer(q) for q in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
