"""Runs a real Mooncake master and a real client for the demonstration: python mooncake.py RPC-PORT HTTP-PORT BYTES

The script prints "ready" after the start. A line of stdin is a JSON list of names. The script puts a small object per name, and replies
with "ok". The script ends at the end of stdin.
"""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request

rpc, http, size = sys.argv[1:]
package = importlib.util.find_spec("mooncake").submodule_search_locations[0]
program = os.path.join(package, "mooncake_master")
if not os.access(program, os.X_OK):
    os.chmod(program, 0o755)
said = tempfile.TemporaryFile()
master = subprocess.Popen([program, "--rpc_address=127.0.0.1", "--rpc_port=" + rpc, "--metrics_host=127.0.0.1", "--metrics_port=" + http],
                          stdout=subprocess.DEVNULL, stderr=said)
try:
    for _ in range(3000):
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{http}/health", timeout=5).close()
            break
        except OSError:
            if master.poll() is not None:
                said.seek(0)
                sys.exit(f"mooncake_master has ended with {master.returncode}: " + said.read(1000).decode(errors="replace").strip())
            time.sleep(0.01)
    from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    code = store.setup("localhost", "P2PHANDSHAKE", int(size), 16 << 20, "tcp", "", "127.0.0.1:" + rpc)
    if code != 0:
        sys.exit(f"the setup of the client returned {code}")
    print("ready", flush=True)
    for line in sys.stdin:
        names = json.loads(line)
        codes = [store.put(name, b"page") for name in names]
        print("ok" if not any(codes) else f"put says {next(c for c in codes if c)}", flush=True)
finally:
    master.kill()
    master.wait()
