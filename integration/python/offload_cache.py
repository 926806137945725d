"""Extends the cache of engine.py with the scheduler side of vLLM's offloading connector from the wheel: the option "offload".

The connector is vLLM's own: OffloadingConnectorScheduler, the events tracker, and CPUOffloadingManager with a policy. This file
simulates only the transfers. A job completes at the commands "transfers" and "reset", at an "admit" with a load, and at the flush of
the worker, before a step overwrites the blocks of the job. After every command, a message has the events of the block pool
before the events of the connector, as in Scheduler.update_from_output.

Options, in {"offload": {…}}:
    blocks_per_chunk    number of blocks per copy and load
    chunks              capacity of the host memory in chunks
    self_describing     the connector's self_describing_kv_events
    policy              lru (default) or arc
"""
import types

REAL = ["vllm.distributed.kv_transfer.kv_connector.utils", "vllm.distributed.kv_transfer.kv_connector.v1.metrics"] + [
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading." + name for name in ("common", "config", "events", "metrics", "scheduler")] + [
    "vllm.v1.kv_offload." + name for name in ("base", "config", "cpu.common", "cpu.manager", "cpu.policies.arc", "cpu.policies.base", "cpu.policies.factory", "cpu.policies.lru")] + [
    "vllm.v1.metrics.cache_hit_source"]


def make(base, opt):
    """Returns the cache of engine.py with the connector as a second tier."""
    import vllm.v1.kv_cache_interface

    vllm.v1.kv_cache_interface.get_dtype_size = lambda dtype: 2
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common, scheduler
    from vllm.v1.kv_offload import base as offload, config
    from vllm.v1.kv_offload.cpu import manager
    from vllm.v1.request import RequestStatus

    class Spec(offload.OffloadingSpec):
        def get_manager(self):
            return manager.CPUOffloadingManager(opt["offload"]["chunks"], cache_policy=opt["offload"].get("policy", "lru"), enable_events=True)

        def get_worker(self, kv_caches):
            raise NotImplementedError

    class Offloading(base):
        def __init__(self, opt):
            super().__init__(opt)
            want = opt["offload"]
            group = lambda i, g: config.OffloadingGroupConfig(tokens_per_block=g.kv_cache_spec.block_size, layer_names=tuple(g.layer_names), group_id=i)
            spec = Spec(config.OffloadingConfig(
                groups=tuple(group(i, g) for i, g in enumerate(self.groups)), worker_kv_bytes_per_block=1, enable_kv_cache_events=True,
                extra_config={"self_describing_kv_events": want["self_describing"], "offload_prompt_only": False}, engine_id="engine",
                model=config.OffloadingModelConfig("m", "float16"), cache=config.OffloadingCacheConfig(self.size, want["blocks_per_chunk"]),
                parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)))
            vllm = types.SimpleNamespace(
                cache_config=types.SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True), speculative_config=None,
                parallel_config=types.SimpleNamespace(world_size=1, decode_context_parallel_size=1))
            self.connector = scheduler.OffloadingConnectorScheduler(spec, vllm, self.kv_cache_config)
            self.jobs = set()  # in flight
            self.told = {}  # by request: the number of blocks per group in the last report to the connector
            self.asked = 0
            self.earlier = []  # events to return before the next events

        def transfer(self, jobs):
            """Reports completed jobs to the connector, like the worker."""
            jobs = set(jobs) & self.jobs
            self.jobs -= jobs
            if jobs:
                done = common.OffloadingWorkerMetadata(completed_jobs={job: 1 for job in jobs})
                self.connector.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=done))

        def transfers(self, cmd):
            self.transfer(self.jobs)
            return {}

        def end_step(self, scheduled=(), finished=(), tokens=0):
            """Reports new and continued requests to the connector at the end of a step, like the scheduler."""
            new, old, blocks = [], [], []
            for name in scheduled:
                ids = self.manager.get_block_ids(name)
                if name not in self.told:
                    new.append(types.SimpleNamespace(req_id=name, block_ids=ids))
                else:
                    old.append(name)
                    blocks.append(tuple(group[n:] for group, n in zip(ids, self.told[name])))
                self.told[name] = [len(group) for group in ids]
            meta = self.connector.build_connector_meta(types.SimpleNamespace(
                scheduled_new_reqs=new, scheduled_cached_reqs=types.SimpleNamespace(req_ids=old, new_block_ids=blocks, resumed_req_ids=set()),
                num_scheduled_tokens={name: tokens for name in scheduled}, finished_req_ids=set(finished), preempted_req_ids=set(),
                kv_cache_block_copies=None, kv_connector_block_state=None))
            self.transfer(meta.jobs_to_flush or ())
            self.jobs |= set(meta.load_jobs) | set(meta.store_jobs)

        def admit(self, cmd):
            r = self.request(cmd["id"], cmd, cmd["tokens"], cmd.get("lora_id"))
            self.connector.on_new_request(r)
            blocks, cached = self.manager.get_computed_blocks(r)[:2]
            loaded = self.connector.get_num_new_matched_tokens(r, cached)[0]
            if loaded is None:  # the connector waits for a copy in flight
                self.connector._release_step()
                self.transfer(self.jobs)
                loaded = self.connector.get_num_new_matched_tokens(r, cached)[0] or 0
            loaded = min(loaded, r.num_tokens - 1 - cached) if cached + loaded >= r.num_tokens else loaded
            self.step()
            if loaded:
                if self.manager.allocate_slots(r, 0, cached, blocks, num_external_computed_tokens=loaded, delay_cache_blocks=True) is None:
                    return self.refuse(r, cached)
                self.connector.update_state_after_alloc(r, self.manager.get_blocks(cmd["id"]), loaded)
                self.end_step()
                self.transfer(self.jobs)
                r.num_computed_tokens = cached + loaded
                self.manager.cache_blocks(r, r.num_computed_tokens)
                rest = r.num_tokens - r.num_computed_tokens
                if cmd.get("limit"):
                    rest = min(rest, cmd["limit"])
                if self.manager.allocate_slots(r, rest) is None:
                    return self.refuse(r, cached)
            else:
                rest = min(r.num_tokens - cached, cmd.get("limit") or r.num_tokens)
                if self.manager.allocate_slots(r, rest, cached, blocks) is None:
                    return self.refuse(r, cached)
                self.connector.update_state_after_alloc(r, self.manager.get_blocks(cmd["id"]), 0)
                r.num_computed_tokens = cached
            self.requests[cmd["id"]] = r
            self.end_step([cmd["id"]], tokens=rest)
            r.num_computed_tokens += rest
            return {"cached": cached + loaded, "fits": True}

        def refuse(self, r, cached):
            """Aborts a request without room."""
            self.finish(r, RequestStatus.FINISHED_ABORTED)
            return {"cached": cached, "fits": False}

        def finish(self, r, status):
            r.status = status
            self.connector.request_finished(r)
            self.manager.free(r)
            self.end_step(finished=[r.request_id])
            self.told.pop(r.request_id, None)

        def compute(self, cmd, until):
            r = self.requests[cmd["id"]]
            self.step()
            rest = until - r.num_computed_tokens
            if self.manager.allocate_slots(r, rest) is None:
                self.free(cmd)
                return False
            self.end_step([cmd["id"]], tokens=rest)
            r.num_computed_tokens = until
            return True

        def free(self, cmd):
            r = self.requests.pop(cmd["id"])
            whole = r.num_computed_tokens >= r.num_prompt_tokens
            self.finish(r, RequestStatus.FINISHED_STOPPED if whole else RequestStatus.FINISHED_ABORTED)
            return {}

        def reset(self, cmd):
            self.transfer(self.jobs)
            self.earlier = self.take_events()  # the events of the step before
            done = bool(self.manager.reset_prefix_cache())
            if done:
                self.connector.reset_cache()
                self.end_step()
            return {"done": done}

        def lookup(self, cmd):
            """Adds "host", the number of tokens that the connector would load after the hit of the device."""
            device, host = [], []
            for p in cmd["prompts"]:
                self.asked += 1
                r = self.request(f"lookup-{self.asked}", p, p["tokens"] + [1 << 29])
                self.connector.on_new_request(r)
                cached = self.manager.get_computed_blocks(r)[1]
                device.append(cached)
                host.append(self.connector.get_num_new_matched_tokens(r, cached)[0])
                r.status = RequestStatus.FINISHED_ABORTED
                self.connector._release_step()
                self.connector.request_finished(r)
                self.end_step(finished=[r.request_id])
            return {"whole": device, "main": device, "host": host}

        def take_events(self):
            earlier, self.earlier = self.earlier, []
            return earlier + list(self.manager.take_events()) + list(self.connector.take_events())

    return Offloading(opt)
