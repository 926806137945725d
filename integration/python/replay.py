"""Replays a request trace through NVIDIA Dynamo's own offline simulator.

    replay.py TRACE '{"workers": 8, "block_size": 64, "points": [{"blocks": 4802, "speed": 1.0}],
        "arms": {"round-robin": null, "exact": {"use_kv_events": true}}}'

TRACE has Mooncake's format. A point has the memory of a worker in blocks, and a speed relative to the trace. An arm has arguments of
KvRouterConfig, or null for round robin. The script prints a line of JSON per point and arm: point, arm, reuse (share of prompt
tokens), ttft_mean and ttft_p90 in ms, output tokens per s, requests done
"""
import json
import sys

from dynamo._core import KvRouterConfig, run_mocker_trace_replay

trace, options = sys.argv[1], json.loads(sys.argv[2])
for i, point in enumerate(options["points"]):
    engine = {"num_gpu_blocks": point["blocks"], "block_size": options["block_size"]}
    for arm, config in options["arms"].items():
        s = run_mocker_trace_replay(
            [trace], extra_engine_args={"engine": engine}, num_workers=options["workers"], trace_block_size=512,
            router_mode="round_robin" if config is None else "kv_router",
            router_config=None if config is None else KvRouterConfig(**config),
            arrival_speedup_ratio=point["speed"], capture_planner_details=False).summary
        print(json.dumps({
            "point": i, "arm": arm, "reuse": s["prefix_cache_reused_ratio"], "ttft_mean": s["mean_ttft_ms"], "ttft_p90": s["p90_ttft_ms"],
            "output": s["output_throughput_tok_s"], "requests": s["completed_requests"]}), flush=True)
