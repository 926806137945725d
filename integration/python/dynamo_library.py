"""Asks NVIDIA Dynamo's own library.

    dynamo_library.py '{}'

A line of JSON for each command on stdin and for each answer on stdout, as with publisher.py.
    {"op": "hash", "cases": [{"tokens": […], "block_size": N, "media": [[u64, …], …], "lora": NAME, "salt": S, "eagle": true}]}
        the local hashes of each case's blocks; media has those of each block's multimodal items. Answers "hashes", a list for each case
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
    except Exception as err:  # whatever it is, the test should hear of it
        say(ok=False, error=f"{type(err).__name__}: {err}")
    else:
        say(ok=True, **answer)
