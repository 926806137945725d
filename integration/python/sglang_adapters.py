"""Compares the names of SGLang's pages in the Python client with SGLang's own event recorder: sglang_adapters.py WHEEL SEED CASES.

KVCacheEventRecorder, RadixKey, TreeNode, LoRARef and kv_event_namespace_seed come from the wheel. SGLang computes page hashes in C++.
page_hash replaces the C++ code with SHA-256 over little-endian u32, like get_hash_str of 0.5.12. The cases are random prompts with
adapters, extra_key, salt and pairs of tokens, in both event formats. The script splits a prompt into nodes at random and records the
nodes. The output is {"cases", "adapters", "named": events with lora_name, "like_base": adapters with the page names of the base model}.
The script fails at the first difference.
"""
import hashlib
import importlib
import json
import os
import random
import struct
import sys
import types
import uuid
from array import array

import sglang_cache
from wheel import StubModule, open_wheel


def page_hash(key, prior, page_size):
    raw, names, digest = list(key.token_ids), [], prior or b""
    for at in range(0, len(key), page_size):
        end = min(at + page_size, len(key))
        words = [w for i in range(at, end) for w in (raw[i:i + 2] if key.is_bigram else raw[i:i + 1])]
        digest = hashlib.sha256(digest + struct.pack(f"<{len(words)}I", *words)).digest()
        names.append(digest.hex())
    return names


def client():
    """Returns sglang_hashes of kvatlas.engine_hashes. The rest of the package needs more libraries and is not imported."""
    package = types.ModuleType("kvatlas")
    package.__path__ = [os.path.join(os.path.dirname(__file__), "..", "..", "clients", "python", "src", "kvatlas")]
    sys.modules["kvatlas"] = package
    return importlib.import_module("kvatlas.engine_hashes").sglang_hashes


class Engine:
    def __init__(self, path):
        self.release = os.path.basename(path).split("-")[1]
        sglang_cache.torch_stand_in(StubModule)
        native = types.ModuleType("sglang.srt.mem_cache.cpp_utils.native_hash")
        native.get_native_hash = page_hash
        sys.modules[native.__name__] = native
        open_wheel(path, sglang_cache.REAL + ["sglang.srt.disaggregation.kv_events", "sglang.srt.lora.lora_registry"])
        self.recorder = importlib.import_module("sglang.srt.mem_cache.events")
        radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        self.RadixKey, self.TreeNode = radix.RadixKey, radix.TreeNode
        self.LoRARef = importlib.import_module("sglang.srt.lora.lora_registry").LoRARef

    def names(self, rng, case):
        """Returns the names of a prompt's pages in order, and the adapter's name in the events."""
        adapter, salt = case["adapter"], case["salt"] or None
        lora_id = adapter.lora_id if adapter else None
        extra_key = (case["extra_key"] or "") + lora_id if adapter else case["extra_key"]  # like Req
        if self.release == "0.5.22":
            names = self.recorder.LoRANameTable()
        else:
            names = self.recorder.KvEventLoraNames()
        if adapter:
            names.register(lora_id=lora_id, lora_name=adapter.lora_name)
            if self.release != "0.5.22":  # like Scheduler._record_kv_event_lora_name
                names.register(types.SimpleNamespace(extra_key=extra_key, lora_id=lora_id), adapter.lora_name)
        page, pair = case["page"], 1 if case["eagle"] else 0
        recorder = self.recorder.KVCacheEventRecorder(
            enabled=True, page_size=page, dynamo_format=case["format"] == "dynamo", lora_names=names)
        key = lambda tokens: self.RadixKey(array("q", tokens), extra_key, bool(pair), cache_salt=salt)
        node = self.TreeNode()
        node.key, node.hash_value = key([]), []
        tokens, pages, at = case["tokens"], (len(case["tokens"]) - pair) // page, 0
        while at < pages:
            end = rng.randint(at + 1, pages)
            child = self.TreeNode()
            child.parent, child.key = node, key(tokens[at * page:end * page + pair])
            recorder.record_store(child)
            node, at = child, end
        found, last, said = [], None, set()
        for event in recorder.take():
            assert event.parent_block_hash == last and event.lora_id is None, event
            found += event.block_hashes
            said.add(event.lora_name)
            last = found[-1]
        assert len(said) < 2
        return found, said.pop() if said else None


def main():
    path, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng, hashes, engine = random.Random(seed), client(), Engine(path)
    out = dict(cases=0, adapters=0, named=0, like_base=0)
    for _ in range(count):
        name, lora_path = rng.choice(["sql", "adapter-x", "ü/é"]), rng.choice(["/models/sql", "org/adapter"])
        kind = rng.randrange(5)  # 0, 1: base; 2: in --lora-paths with a name; 3: in --lora-paths with only a path; 4: loaded later
        adapter, given = None, {}
        if kind == 2:
            adapter = engine.LoRARef(lora_id=engine.LoRARef.deterministic_id(name, lora_path), lora_name=name)
            given = dict(lora_name=name, lora_path=lora_path)
        elif kind == 3:
            adapter = engine.LoRARef(lora_id=engine.LoRARef.deterministic_id(lora_path, lora_path), lora_name=lora_path)
            given = dict(lora_name=lora_path)
        elif kind == 4:
            adapter = engine.LoRARef(lora_id=uuid.UUID(int=rng.getrandbits(128)).hex, lora_name=name)
            given = dict(lora_name=name, lora_id=adapter.lora_id)
        case = dict(adapter=adapter, page=rng.choice([1, 2, 4, 16]), eagle=rng.random() < 0.3, format=rng.choice(["default", "dynamo"]),
                    salt=rng.choice(["", "", "tenant-a", "é"]), extra_key=rng.choice([None, None, "", "class-1"]))
        case["tokens"] = [rng.choice([0, 1, 151643, 2**32 - 1]) for _ in range(rng.randrange(80))]
        want, said = engine.names(rng, case)
        same = dict(cache_salt=case["salt"], eagle=case["eagle"], release=engine.release, event_format=case["format"])
        got = hashes(case["tokens"], case["page"], extra_key=case["extra_key"], **given, **same)
        if got != want:
            raise SystemExit(f"{case}: {got}, want {want}")
        out["cases"] += 1
        if adapter and want:
            assert said in (None, adapter.lora_name)
            out["adapters"] += 1
            out["named"] += said is not None
            out["like_base"] += want == hashes(case["tokens"], case["page"], **same)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
