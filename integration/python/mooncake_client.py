"""Runs a real Mooncake client. Reads JSON [operation, keys, bytes] per line, and replies with "@ok" or "@" and an error.

    mooncake_client.py HOST:PORT-OF-THE-MASTER BYTES-OF-MEMORY

The operations are put (objects with the number of bytes), remove, and close. A closed client owns no memory.
"""

import json
import sys
import time

from mooncake.store import MooncakeDistributedStore

NO_ROOM = -200  # temporary: the master evicts objects in a separate thread


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
