"""A real Mooncake client that does as it is told: lines of JSON [operation, keys] in, a line "@ok" or "@what went wrong" out."""

import json
import sys

from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
code = store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
print("@ok" if code == 0 else f"@setup: {code}", flush=True)
for line in sys.stdin:
    operation, keys = json.loads(line)
    codes = [store.put(k, b"page") if operation == "put" else store.remove(k) for k in keys]
    print("@ok" if not any(codes) else f"@{operation}: {codes}", flush=True)
