"""Computes block hashes with NVIDIA Dynamo's own library.

    dynamo_library.py '{}'

The protocol is that of publisher.py: a JSON object per line, commands on stdin and replies on stdout.
    {"op": "hash", "cases": [{"tokens": […], "block_size": N, "media": [[u64, …], …], "lora": NAME, "salt": S, "eagle": true}]}
        replies with "hashes", a list per case with the local hashes of the blocks. media has the hashes of the multimodal items
        per block
"""
import json
import sys

from dynamo.llm import compute_block_hash_for_seq


def hashes(case):
    media = case.get("media")
    infos = media and [{"mm_objects": [{"mm_hash": h, "offsets": []} for h in block]} if block else None for block in media]
    return compute_block_hash_for_seq(
        case["tokens"], case["block_size"], infos or None, case.get("lora") or None, case.get("eagle"), case.get("salt") or None)


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


say(ok=True)
for line in sys.stdin:
    try:
        cmd = json.loads(line)
        if cmd["op"] != "hash":
            raise ValueError(f"no command {cmd['op']!r}")
        answer = {"hashes": [hashes(c) for c in cmd["cases"]]}
    except Exception as err:  # the test reports every error
        say(ok=False, error=f"{type(err).__name__}: {err}")
    else:
        say(ok=True, **answer)
