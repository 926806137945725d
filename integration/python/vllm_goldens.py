"""Writes pkg/hicache/testdata/vllm.json: vllm_goldens.py WHEEL-0.24.0 WHEEL-0.32.0 WHEEL-0.33.0 > vllm.json

A case is a prompt with the hashes of blocks from the release's own request hasher.
"""
import json
import os
import subprocess
import sys


def ask(wheel, questions):
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hicache.py")
    out = subprocess.run([sys.executable, script, json.dumps({"wheel": wheel})], input=json.dumps(questions) + "\n", text=True, check=True, stdout=subprocess.PIPE)
    return json.loads(out.stdout)


plain = [dict(tokens=list(range(1, 9)), block=4, algo=algo, seed="0", lora=None, salt=None, lookahead=0)
         for algo in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")]
large = dict(plain[0], tokens=[100, 300, 70000, 4294967295, 2147483648, 2147483647, 65536, 65535, 5], block=3)
salted = [dict(p, salt="tenant-a") for p in plain]
lora = [dict(p, lora="lora-a", salt="é") for p in plain]
ahead = [dict(p, lookahead=n, salt=s, tokens=list(range(1, 15))) for p in plain for n, s in ((1, None), (3, "tenant-a"))]
fixed = [dict(p, seed=None) for p in plain[:2]]
cases = []
for wheel, version, questions in (
        (sys.argv[1], "0.24.0", plain + [large] + salted + lora), (sys.argv[2], "0.32.0", plain + [large] + salted + fixed), (sys.argv[3], "0.33.0", ahead)):
    for q, answer in zip(questions, ask(wheel, questions)):
        cases.append(dict(q, version=version, hashes=answer["hashes"]))
print("[\n" + ",\n".join(" " + json.dumps(c) for c in cases) + "\n]")
