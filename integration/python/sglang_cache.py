"""Runs SGLang's own radix caches from the wheel, without torch. Values are lists of numbers, because caches only slice and copy values.

engine.py imports this module and documents the commands.
"""
import array
import hashlib
import importlib
import inspect
import sys
import types
import zipfile

import wheel


class Tensor(list):
    """A list with the methods of a tensor of indices that caches use."""

    device = "cpu"
    dtype = "int64"

    def __getitem__(self, at):
        got = super().__getitem__(at)
        return Tensor(got) if isinstance(at, slice) else got

    def clone(self):
        return Tensor(self)

    def to(self, *_, **__):
        return Tensor(self)

    def tolist(self):
        return list(self)

    def numel(self):
        return len(self)


def cat(parts, **_):
    return Tensor(x for part in parts for x in part)


def torch_stand_in(stub):
    """Installs a module torch with lists as tensors. All further names are stubs."""
    torch = stub("torch")
    torch.Tensor, torch.cat = Tensor, cat
    torch.tensor = lambda data, **_: Tensor(data)
    torch.empty = lambda shape, **_: Tensor([0] * (shape if isinstance(shape, int) else shape[0]))
    torch.equal = lambda a, b: list(a) == list(b)
    torch.int64, torch.device = "int64", lambda name, *_: name
    sys.modules["torch"] = torch


def native_hash(key, prior=None, page_size=None):
    """Replaces the C++ hash of later versions: SHA-256 of the page before and the page's tokens. The tests accept any names of blocks."""
    names, raw = [], list(key.token_ids)[:len(key)]
    for at in range(0, len(raw), page_size or max(1, len(raw))):
        prior = hashlib.sha256((prior or b"") + array.array("q", raw[at:at + (page_size or len(raw))]).tobytes()).digest()
        names.append(prior.hex())
    return names if page_size else names[-1]


def native_hash_stand_in():
    module = types.ModuleType("sglang.srt.mem_cache.cpp_utils.native_hash")
    module.get_native_hash = native_hash
    sys.modules[module.__name__] = module


REAL = [
    "sglang.srt.mem_cache." + name
    for name in ("base_prefix_cache", "cache_init_params", "events", "evict_policy", "radix_cache", "swa_radix_cache", "mamba_radix_cache", "utils")
]


# The modules of 0.5.23, with a single class for hybrid models.
UNIFIED = ["sglang.srt.session.streaming_session"] + [
    "sglang.srt.mem_cache." + name
    for name in (
        "common", "hicache_storage", "unified_radix_cache", "unified_cache", "unified_cache.cache_action",
        "unified_cache.component_type", "unified_cache.components", "unified_cache.components.base",
        "unified_cache.components.full", "unified_cache.components.mamba", "unified_cache.components.swa",
        "unified_cache.session_ref_tracker", "unified_cache.tree_core_registry", "unified_cache.unified_tree_core",
        "unified_cache.unified_tree_core_interface")
]


def real(wheel):
    """Returns the names of the modules to read from a wheel."""
    with zipfile.ZipFile(wheel) as files:
        old = "sglang/srt/mem_cache/swa_radix_cache.py" in files.namelist()
    return REAL if old else REAL + UNIFIED


class Allocator:
    """An allocator that ignores all calls. The load determines the use of memory."""

    device = "cpu"

    def free(self, *_, **__):
        pass

    def translate_swa_indices_for_transfer(self, indices):
        return Tensor(indices)

    def __getattr__(self, name):
        if name in ("full_attn_allocator", "swa_attn_allocator"):
            return Allocator()
        return self.free

    def get_kvcache(self):
        return None


class Cache:
    """A cache of SGLang, with the calls of the scheduler at the end of requests."""

    def __init__(self, opt, lora_name=None):
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        params = importlib.import_module("sglang.srt.mem_cache.cache_init_params")
        radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        self.base, self.RadixKey = base, radix.RadixKey
        self.size = opt["block_size"]
        others = [g.partition(":") for g in opt["groups"][1:]]  # in addition to full attention
        self.kind = others[-1][0] if others else "full"
        self.window = max((int(window) for kind, _, window in others if kind == "swa"), default=0)
        self.unified = bool(others) and UNIFIED[0] in wheel.finder.real
        free = types.SimpleNamespace(free=lambda *_, **__: None)
        fields = dict(mamba_pool=free, mamba_allocator=free, mamba_ping_pong_track_buffer_size=2)
        common = dict(enable_kv_cache_events=True, sliding_window_size=self.window or None, enable_mamba_extra_buffer=True)
        if self.unified:
            module = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
            of = importlib.import_module("sglang.srt.mem_cache.unified_cache.component_type").ComponentType
            self.swa = of.SWA
            common.update(tree_components=(of.FULL, *(getattr(of, kind.upper()) for kind, _, _ in others)), tree_core_backend="python")
            mamba = importlib.import_module("sglang.srt.mem_cache.unified_cache.components.mamba")
            mamba.mamba_cache_chunk_size, mamba.mamba_checkpoint_grid = lambda: self.size, lambda page: page
            mamba.get_exec = lambda: types.SimpleNamespace(mamba=types.SimpleNamespace(mamba_max_states_per_path=-1))
            name = "UnifiedRadixCache"
            bases = [importlib.import_module("sglang.srt.mem_cache.allocator.swa").SWATokenToKVPoolAllocator]
            pool = type("Pool", (importlib.import_module("sglang.srt.mem_cache.memory_pool").HybridReqToTokenPool,), fields)()
        else:
            name, of = {"full": ("RadixCache", "radix_cache"), "swa": ("SWARadixCache", "swa_radix_cache"), "mamba": ("MambaRadixCache", "mamba_radix_cache")}[self.kind]
            module = importlib.import_module("sglang.srt.mem_cache." + of)
            bases = [getattr(module, n) for n in ("SWATokenToKVPoolAllocator", "TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator") if hasattr(module, n)][:1]
            pool = None
            if self.kind == "mamba":
                pool = types.SimpleNamespace(**fields)
                module.get_global_server_args = lambda: types.SimpleNamespace(mamba_cache_chunk_size=self.size)
        self.cache = getattr(module, name)(self.construct(params.CacheInitParams, dict(
            disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=type("Free", (Allocator, *bases), {})(), page_size=self.size), **common))
        self.manager = self  # engine.py calls take_events of manager
        if not hasattr(self.cache, "mamba_cache_chunk_size") or self.kind == "mamba":
            self.cache.mamba_cache_chunk_size = self.size
        # The tokens of a key are an array from about 0.5.18 on.
        self.tokens = (lambda t: array.array("q", t)) if "limit" in self.RadixKey.__slots__ else list
        self.next = 1
        self.started = {}

    @staticmethod
    def construct(what, required, **optional):
        has = inspect.signature(what).parameters
        return what(**required, **{k: v for k, v in optional.items() if k in has})

    def take_events(self):
        return self.cache.take_events()

    def key(self, tokens):
        return self.RadixKey(self.tokens(tokens), None)

    def params(self, cls, **fields):
        has = inspect.signature(cls).parameters
        return cls(**{k: v for k, v in fields.items() if k in has})

    def match(self, tokens):
        got = self.cache.match_prefix(self.params(self.base.MatchPrefixParams, key=self.key(tokens)))
        return got.device_prefix_len if hasattr(got, "device_prefix_len") else len(got.device_indices)

    def insert(self, tokens):
        """Inserts the pages and the last state of a request with these tokens. The pages before the window are already evicted."""
        whole = len(tokens) // self.size * self.size
        if whole == 0:
            return
        tokens = tokens[:whole]
        value = Tensor(range(self.next, self.next + whole))
        self.next += whole
        gone = max(0, whole - self.window - self.size) // self.size * self.size if self.window else 0
        self.cache.insert(self.params(
            self.base.InsertParams, key=self.key(tokens), value=value, prev_prefix_len=self.match(tokens),
            swa_evicted_seqlen=gone, component_evicted_seqlens={self.swa: gone} if self.unified else {},
            mamba_value=Tensor([self.next])))

    def admit(self, cmd):
        hit = self.match(cmd["tokens"])
        self.insert(cmd["tokens"])
        self.started[cmd["id"]] = cmd["tokens"]
        return {"cached": hit, "fits": True}

    def append(self, cmd):
        self.started[cmd["id"]] = self.started[cmd["id"]] + cmd["tokens"]
        self.insert(self.started[cmd["id"]])
        return {"fits": True}

    def free(self, cmd):
        del self.started[cmd["id"]]
        return {}

    def evict(self, cmd):
        n = cmd["ids"] * self.size // 4
        fields = dict(num_tokens=n) if cmd["ids"] % 2 or self.kind == "full" else dict(num_tokens=0, swa_num_tokens=n, mamba_num=cmd["ids"] // 8)
        self.cache.evict(self.params(self.base.EvictParams, **fields))
        return {"can": True}

    def reset(self, _):
        self.cache.reset()
        return {"done": True}

    def lookup(self, cmd):
        whole, main = [], []
        for p in cmd["prompts"]:
            main.append(self.full(p["tokens"]))
            whole.append(self.match(p["tokens"]))
        return {"whole": whole, "main": main}

    def full(self, tokens):
        """Returns the hit in pages of full attention, in tokens, without windows and states. Without UnifiedRadixCache, full walks the tree of the cache."""
        if self.unified:
            return self.cache.match_prefix(self.params(self.base.MatchPrefixParams, key=self.key(tokens))).full_kv_hit_length
        node, key, n = self.cache.root_node, self.key(tokens[:len(tokens) // self.size * self.size]), 0
        child = getattr(self.cache, "get_child_key_fn", None) or (lambda k: k.child_key(self.size))
        while len(key) > 0 and (at := child(key)) in node.children:
            node = node.children[at]
            if hasattr(node.key, "match"):
                got = node.key.match(key, page_size=self.size)
            else:
                got = self.cache.key_match_fn(node.key, key)
            n += got
            if got < len(node.key):
                break
            key = key[got:]
        return n
