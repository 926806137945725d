"""A real Mooncake client that does as it is told: lines of JSON [operation, keys, bytes] in, a line "@ok" or "@what went wrong" out.

    mooncake_client.py HOST:PORT-OF-THE-MASTER BYTES-OF-MEMORY

Operations are put (objects of so many bytes), remove, and close, after which the client owns nothing more.
"""

import json
import sys
import time

from mooncake.store import MooncakeDistributedStore

NO_ROOM = -200  # for now: the master evicts in a thread of its own


def put(key, size):
    for _ in range(2000):
        code = store.put(key, bytes(size))
        if code != NO_ROOM:
            return code
        time.sleep(0.005)
    return code


store = MooncakeDistributedStore()
code = store.setup("localhost", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("@ok" if code == 0 else f"@setup: {code}", flush=True)
for line in sys.stdin:
    operation, keys, size = json.loads(line)
    if operation == "close":
        codes = [store.close()]
    else:
        codes = [put(k, size) if operation == "put" else store.remove(k) for k in keys]
    print("@ok" if not any(codes) else f"@{operation}: {codes}", flush=True)
