"""Runs SGLang's own "file" storage backend from the wheel: HiCacheFile, with an object per rank of a worker.

    hicache_file.py '{"wheel": "/path/of/a/wheel", "folder": "/path", "model": text, "tp": n, "pp": n, "mla": bool, "room": bytes or null}'

"room" is the size per rank at which SGLang's own eviction begins. A line of stdin is [operation, rank, [hash..]]. The script replies
with a line per operation:

    set     the rank's backend writes a page of 100 bytes per hash
    exists  the number of leading pages in the rank's backend
"""
import importlib
import json
import sys

import wheel


class Bytes:
    """A tensor with the methods that the backend uses for a write."""

    def __init__(self, n):
        import numpy
        self.data = numpy.zeros(n, dtype=numpy.uint8)

    def numel(self):
        return len(self.data)

    def element_size(self):
        return 1

    def contiguous(self):
        return self

    def view(self, dtype):
        return self

    def numpy(self):
        return self.data


def main():
    options = json.loads(sys.argv[1])
    base = "sglang.srt.mem_cache."
    wheel.open_wheel(options["wheel"], ["sglang.srt.environ", base + "hicache_storage", base + "storage.file.lru_file_evictor"])
    code = importlib.import_module(base + "hicache_storage")
    ranks = [code.HiCacheFile(code.HiCacheStorageConfig(
        tp_rank=tp, tp_size=options["tp"], pp_rank=pp, pp_size=options["pp"], attn_cp_rank=0, attn_cp_size=1, is_mla_model=options["mla"],
        enable_storage_metrics=False, is_page_first_layout=False, model_name=options["model"],
        extra_config={"max_size": options["room"]} if options["room"] else None), options["folder"])
        for pp in range(options["pp"]) for tp in range(options["tp"])]
    for line in sys.stdin:
        operation, rank, hashes = json.loads(line)
        if operation == "set":
            print(json.dumps(ranks[rank].batch_set(hashes, [Bytes(100) for _ in hashes])), flush=True)
        else:
            print(json.dumps(ranks[rank].batch_exists(hashes)), flush=True)


if __name__ == "__main__":
    main()
