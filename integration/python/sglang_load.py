"""Runs SGLang's own load publisher: sglang_load.py WHEEL LOAD_ENDPOINT DP_SIZE RANK.

SchedulerLoadPublisher comes from the wheel. Each line of stdin is a JSON object with the fields of a LoadSnapshot. The script publishes
every snapshot. The script prints "published" or "disabled" after the start.
"""
import importlib
import json
import sys
import types

from wheel import open_wheel

PACKAGE = "sglang.srt.managers.scheduler_components.load_publisher"


def main():
    path, endpoint, size, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    parallel = types.SimpleNamespace(pp_rank=0, attn_tp_rank=0, attn_cp_rank=0, num_dp_ranks=size, attn_dp_size=size,
                                     attn_dp_rank=rank, dp_rank=rank)
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: parallel
    sys.modules[context.__name__] = context
    open_wheel(path, [PACKAGE, "sglang.srt.disaggregation.kv_events", "sglang.srt.utils.network"])
    publisher = importlib.import_module(PACKAGE).SchedulerLoadPublisher(
        kv_events_config=json.dumps({"publisher": "zmq", "endpoint": "tcp://*:1"}), load_publish_endpoint=endpoint)
    print("published" if publisher.enable else "disabled", flush=True)
    for line in sys.stdin:
        publisher.publish_load_stat(None, force=True, snapshot=types.SimpleNamespace(**json.loads(line)))


main()
