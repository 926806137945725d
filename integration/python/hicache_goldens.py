"""Writes pkg/hicache/testdata/sglang.json: hicache_goldens.py WHEEL-0.5.12 WHEEL-0.5.23 > sglang.json

Page hashes come from 0.5.12. Keys and namespaces come from 0.5.23.
"""
import json
import os
import subprocess
import sys


def ask(wheel, questions):
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hicache.py")
    out = subprocess.run([sys.executable, script, json.dumps({"wheel": wheel})], input=json.dumps(questions) + "\n", text=True, check=True, stdout=subprocess.PIPE)
    return json.loads(out.stdout)


pages = [dict(tokens=list(t), page=p, eagle=e, extra_key=x, salt=s) for t, p, e, x, s in [
    (range(1, 11), 4, False, None, None), (range(10, 15), 2, True, None, None), (range(3), 1, False, None, None),
    ([151643, 151644, 4294967295, 65536], 2, False, None, None), (range(128), 64, False, None, None), (range(129), 64, True, None, None),
    ([7, 8, 9], 2, False, None, None), ([1], 2, False, None, None), (range(1, 9), 4, False, "lora1", None),
    (range(1, 9), 4, False, None, "tenant-a"), (range(1, 9), 4, True, "lora1", "tenant-a"), (range(1, 9), 4, False, "", "é")]]
for page, seed in zip(pages, ask(sys.argv[2], [dict(extra_key=p["extra_key"], salt=p["salt"]) for p in pages])):
    page["prior"] = seed["seed"]
for page, answer in zip(pages, ask(sys.argv[1], pages)):
    page["hashes"] = answer["hashes"]
    del page["prior"]

hash = bytes(range(32)).hex()
keys = []
questions = [dict(hash=hash, tp=tp, pp=pp, mla=mla, lcm=lcm, split=lcm is not None, tag=tag, model="org/Model-7B") for tp, pp, mla, lcm, tag in [
    (1, 1, False, None, None), (2, 1, False, None, "blue"), (2, 2, False, None, None), (2, 1, False, 4, "blue"), (2, 2, False, 8, None),
    (4, 1, True, None, None), (4, 3, True, None, "blue")]]
for q, answer in zip(questions, ask(sys.argv[2], questions)):
    config = dict(backend="mooncake", page_size=1, tp_size=q["tp"], pp_size=q["pp"], is_mla_model=q["mla"], tp_lcm_size=q["lcm"],
                  should_split_heads=q["split"], extra_backend_tag=q["tag"], model_name=q["model"], model_in_keys=True)
    keys.append(dict(config=config, hash=hash, keys=answer["keys"]))
print(json.dumps(dict(pages=pages, keys=keys), indent=1))
