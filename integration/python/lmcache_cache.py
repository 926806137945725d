"""Extends the cache of engine.py with LMCache's event channel of the multiprocess mode: the option "lmcache".

LMCache's own classes create the events. KVEventModule of the server has the log and the replay. The worker's adapter reads the log,
announces chunks, and withdraws chunks after a loss. The connector converts the records to events of vLLM. This file simulates the
storage of the server. A request stores whole chunks after the computation. A full server evicts the chunk with the oldest store. Other
engines store chunks on the same server.

Options, in {"lmcache": {…}}:
    wheel       path of LMCache's wheel
    chunk       tokens per chunk
    chunks      capacity of the server in chunks
    log         number of records that the server keeps for replay

Commands in addition to those of engine.py:
    {"op": "foreign", "tokens": […]}    another engine stores the chunks of a prompt
    {"op": "restart"}                   restarts an empty server, and the worker subscribes again
"""
import hashlib
import types
from collections import OrderedDict

from wheel import open_wheel

REAL = ["lmcache.utils", "lmcache.integration.vllm.lmcache_mp_connector", "lmcache.integration.vllm.vllm_multi_process_adapter",
        "lmcache.v1.distributed.api", "lmcache.v1.mp_observability.event", "lmcache.v1.multiprocess.custom_types",
        "lmcache.v1.multiprocess.modules.kv_events", "lmcache.v1.multiprocess.token_codec"]
MODEL = "m"


class Bus:
    """The event bus of the server's modules."""

    enabled = True

    def __init__(self):
        self.told = {}

    def subscribe(self, kind, hear):
        self.told[kind] = hear

    def subscribe_drops(self, hear):
        pass

    def dropped_events_count(self):
        return 0


def make(base, opt):
    """Returns the cache of engine.py with LMCache as a second tier."""
    want = opt["lmcache"]
    open_wheel(want["wheel"], REAL)
    from lmcache.integration.vllm import lmcache_mp_connector as connector, vllm_multi_process_adapter as adapter
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.mp_observability.event import Event, EventType
    from lmcache.v1.multiprocess.modules.kv_events import KVEventModule

    class Server:
        """An incarnation of the server."""

        def __init__(self):
            self.bus = Bus()
            self.events = KVEventModule(types.SimpleNamespace(event_bus=self.bus), kv_event_log_size=want["log"])
            self.kept = OrderedDict()  # the key is the hash of a chunk

        def tell(self, kind, **metadata):
            self.bus.told[kind](Event(kind, metadata=metadata))

        def store(self, chunks):
            """Stores chunks. A chunk has a hash, the tokens and the hash of the chunk before."""
            new = [c for c in chunks if c[0] not in self.kept]
            if not new:
                return
            self.tell(EventType.MP_TOKENS, chunk_hashes=[c[0] for c in new], token_chunks=[c[1] for c in new], parent_hashes=[c[2] for c in new])
            for c in new:
                if len(self.kept) >= want["chunks"]:
                    self.tell(EventType.L1_KEYS_EVICTED, keys=[self.key(self.kept.popitem(last=False)[0])])
                self.kept[c[0]] = True
                self.tell(EventType.L1_WRITE_FINISHED, keys=[self.key(c[0])])

        @staticmethod
        def key(digest):
            return ObjectKey(chunk_hash=digest, model_name=MODEL, kv_rank=0)

    class Cached(base):
        def __init__(self, opt):
            super().__init__(opt)
            self.server = Server()
            self.here = set()  # chunks computed by this engine since the last reset of the device, without salt or adapter
            self.fresh = set()  # chunks of here, computed since their last store on the server, before the first silent chunk of the prompt
            # Chunks on the server at the last reset of vLLM. LMCache announces neither these chunks again nor the chunks after them.
            self.silent = set()
            worker = self.worker = object.__new__(adapter.LMCacheMPWorkerAdapter)
            worker._announced_kv_hashes, worker._kv_events, worker._kv_event_incarnation = set(), [], None
            worker._kv_event_lock = __import__("threading").RLock()
            worker._kv_events_enabled = worker._kv_event_server_source = True
            worker._kv_event_subscriber = False
            worker.lmcache_tokens_per_chunk = want["chunk"]
            worker._ensure_heartbeat_started = lambda: None
            figure = types.SimpleNamespace(inc=lambda *n: None, set=lambda n: None)
            worker._kv_events_buffered = worker._kv_events_generated = worker._kv_events_drained = worker._kv_event_batches = figure
            worker._kv_event_resyncs = {name: figure for name in ("server_restart", "events_lost", "stream_closed")}
            self.cursor = 0

        def chunks(self, tokens):
            before, all = None, []
            for end in range(want["chunk"], len(tokens) + 1, want["chunk"]):
                chunk = tuple(tokens[end - want["chunk"]:end])
                digest = hashlib.sha256(repr((before, chunk)).encode()).digest()
                all.append((digest, chunk, before))
                before = digest
            return all

        def keep(self, r):
            """Stores the whole chunks that a request has computed. The server's log has no salts and no adapters."""
            if not r.cache_salt and not r.lora_request:
                chunks = self.chunks(list(r.all_token_ids)[:r.num_computed_tokens])
                self.forget()
                self.here.update(c[0] for c in chunks)
                self.server.store(chunks)
                self.silent &= self.server.kept.keys()
                for c in chunks:
                    if c[0] in self.silent:
                        break
                    self.fresh.add(c[0])

        def admit(self, cmd):
            answer = super().admit(cmd)
            if answer["fits"]:
                self.keep(self.requests[cmd["id"]])
            return answer

        def append(self, cmd):
            r = self.requests[cmd["id"]]
            answer = super().append(cmd)
            if answer["fits"]:
                self.keep(r)
            return answer

        def reset(self, cmd):
            self.earlier = self.take_events()
            answer = super().reset(cmd)
            if answer["done"]:  # vLLM announces the removal of all blocks in all tiers
                self.here.clear()
                self.fresh.clear()
                self.silent = set(self.server.kept)
            return answer

        def forget(self):
            self.fresh &= self.server.kept.keys()
            self.silent &= self.server.kept.keys()

        def foreign(self, cmd):
            self.forget()
            self.server.store(self.chunks(cmd["tokens"]))
            return {}

        def restart(self, cmd):
            self.server = Server()
            self.cursor = 0
            self.fresh.clear()
            return {}

        def lookup(self, cmd):
            """Adds the tokens that LMCache would load after the hit of the device: "host" from fresh chunks, "most" from all chunks
            computed since the last reset. The first chunk is the chunk at the end of the device's prefix."""
            answer = super().lookup(cmd)
            self.forget()
            for name, of in (("host", self.fresh), ("most", self.here)):
                answer[name] = [self.loads(p, device, of) for p, device in zip(cmd["prompts"], answer["whole"])]
            return answer

        def loads(self, p, device, of):
            end = device // want["chunk"] * want["chunk"]
            if not p.get("salt") and not p.get("lora"):
                for digest, _, _ in self.chunks(p["tokens"])[end // want["chunk"]:]:
                    if digest not in self.server.kept or digest not in of:
                        break
                    end += want["chunk"]
            return max(0, end - device)

        def take_events(self):
            while True:
                batch = self.server.events.read_kv_events(MODEL, self.cursor, 1024)
                self.worker._apply_kv_event_batch(batch)
                if batch.next_cursor == self.cursor:
                    break
                self.cursor = batch.next_cursor
            told = connector.LMCacheMPConnector.get_kv_connector_kv_cache_events(types.SimpleNamespace(_enable_kv_events=True, worker_adapter=self.worker))
            earlier, self.earlier = getattr(self, "earlier", []), []
            return earlier + list(self.manager.take_events()) + (told.aggregate().get_all_events() if told else [])

    return Cached(opt)
