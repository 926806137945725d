"""Writes internal/ingest/enginehttp/testdata/vllm-0.32.0.json: vllm_http_goldens.py > vllm-0.32.0.json

The script needs an environment with a whole vLLM (make real-vllm installs one). The bodies come from vLLM's own routes, publishers,
model list, cache configuration and metrics. No engine runs.
"""
import asyncio
import json
import types

from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from vllm import __version__
from vllm.config import CacheConfig, KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory
from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry, OpenAIServingModels
from vllm.entrypoints.serve.instrumentator.basic import router
from vllm.v1.metrics.loggers import PrometheusStatLogger


def sources(config, ranks=1):
    publishers = {r: EventPublisherFactory.create(KVEventsConfig(**config), r) for r in range(ranks)}
    said = {r: p.get_publisher_config() for r, p in publishers.items()}
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = types.SimpleNamespace(get_kv_event_sources=lambda: {r: c for r, c in said.items() if c is not None})
    client = TestClient(app)
    out = {"/kv_event_sources": client.get("/kv_event_sources").text, "/version": client.get("/version").text}
    for p in publishers.values():
        p.shutdown()
    return out


def models(names, lora):
    model_config = types.SimpleNamespace(max_model_len=4096)
    self = types.SimpleNamespace(lora_requests={}, base_model_paths=[BaseModelPath(name=n, model_path="/models/llama") for n in names])
    if lora:
        self.lora_requests = {lora: types.SimpleNamespace(lora_name=lora, path="/adapters/a", base_model_name=None)}
    self.registry = OpenAIModelRegistry(model_config=model_config, base_model_paths=self.base_model_paths)
    return asyncio.run(OpenAIServingModels.show_available_models(self)).model_dump_json()


def metrics(**resolved):
    cache = CacheConfig(block_size=resolved.pop("block_size", 16))
    for k, v in resolved.items():
        setattr(cache, k, v)
    registry = CollectorRegistry()
    logger = types.SimpleNamespace(engine_indexes=[0, 1], _gauge_cls=lambda name, documentation, multiprocess_mode, labelnames: Gauge(
        name, documentation, labelnames=list(labelnames), registry=registry))
    PrometheusStatLogger.log_metrics_info(logger, "cache_config", cache)
    return generate_latest(registry).decode()


events = dict(enable_kv_cache_events=True, publisher="zmq")
cases = {
    "two ranks, replay, a topic": dict(sources(dict(events, endpoint="tcp://*:25557", replay_endpoint="tcp://*:25657", topic="kv"), 2),
                                       **{"/v1/models": models(["llama", "llama-alias"], "adapter"),
                                          "/metrics": metrics(block_size=32, effective_attention_block_size=32)}),
    "ports that the system chose": dict(sources(dict(events, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")),
                                        **{"/v1/models": models(["llama"], None), "/metrics": metrics(effective_attention_block_size=None)}),
    "dials out": dict(sources(dict(events, endpoint="tcp://127.0.0.1:25758")), **{"/v1/models": models(["llama"], None), "/metrics": metrics()}),
    "ipc": dict(sources(dict(events, endpoint="ipc:///tmp/vllm-golden.sock")), **{"/v1/models": models(["llama"], None), "/metrics": metrics()}),
    "no events": dict(sources(dict()), **{"/v1/models": models(["llama"], None), "/metrics": metrics()}),
}
print(json.dumps({"version": __version__, "cases": cases}, indent=1))
