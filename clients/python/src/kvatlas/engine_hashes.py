"""The names that engines give to a prompt's blocks in their events, for `Query.engine_hashes` and the like.

A router that has them already sends those. These functions make them from tokens, as the engines' own code does; only
vLLM's xxHash algorithms need the extra `kvatlas[hash]`. To ask by `kvatlas.hashing.block_hashes` is faster, and serves
for all engines: use these where nothing else than the engine's names may be sent.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Iterable

from ._tokens import pack


def sglang_hashes(tokens: Iterable[int], page_size: int, *, lora_name: str = "", cache_salt: str = "",
                  eagle: bool = False) -> list[int]:
    """The names of SGLang's pages: the first 8 bytes, signed, of SHA-256 over the page before and the page's tokens.

    Source: `get_hash_str` and `hash_str_to_int64` in SGLang's srt/mem_cache, and events' namespaces of 0.5.22 and
    later. eagle: the pages are of pairs of tokens.
    """
    _check(page_size, "page_size")
    data = bytes(pack(tokens))
    if eagle:
        data = b"".join(data[i:i + 8] for i in range(0, len(data) - 4, 4))
    step = page_size * (8 if eagle else 4)
    prior = hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest() if cache_salt else b""
    adapter = hashlib.sha256(b"sglang-kv-event-lora-v1\0" + lora_name.encode()).digest() if lora_name else b""
    names = []
    for i in range(0, len(data) - step + 1, step):
        prior = hashlib.sha256(prior + data[i:i + step]).digest()
        name = prior[:8]
        if adapter:
            name = hashlib.sha256(adapter + name).digest()[:8]
        names.append(int.from_bytes(name, "big", signed=True))
    return names


def vllm_hashes(tokens: Iterable[int], block_size: int, *, algorithm: str = "sha256",
                seed: str = "vllm-none-hash") -> list[int]:
    """The names of vLLM's blocks in events: the last 8 bytes of their digests. Prompts have no LoRA, salt or image.

    algorithm is the engines' `--prefix-caching-hash-algo`: sha256, sha256_cbor, xxhash or xxhash_cbor. seed is their
    PYTHONHASHSEED. Without one, SHA-256 has a fixed seed from release 0.29 on, which is the default here; before, and
    with xxHash, each process draws its own, and its names cannot be made elsewhere.
    Source: `hash_block_tokens` and `init_none_hash` in vllm/v1/core/kv_cache_utils.py.
    """
    _check(block_size, "block_size")
    family, _, form = algorithm.partition("_")
    if family not in ("sha256", "xxhash") or form not in ("", "cbor"):
        raise ValueError(f"algorithm is {algorithm!r}, not sha256, sha256_cbor, xxhash or xxhash_cbor")
    if family == "xxhash" and seed == "vllm-none-hash":
        raise ValueError("with xxhash, seed must be the engines' PYTHONHASHSEED: without, each process draws its own")
    digest = _xxh3 if family == "xxhash" else _sha256
    text: Callable[[str], bytes] = _cbor_text if form else _pickle
    block: Callable[[bytes, tuple[int, ...]], bytes] = _cbor_block if form else _pickle_block
    data = pack(tokens)
    values = struct.unpack(f"<{len(data) // 4}I", data)
    parent, names = digest(text(seed)), []
    for i in range(0, len(values) - block_size + 1, block_size):
        parent = digest(block(parent, values[i:i + block_size]))
        names.append(int.from_bytes(parent[-8:], "big"))
    return names


def _check(size: int, name: str) -> None:
    if not 1 <= size <= 65535:
        raise ValueError(f"{name} is {size}, not from 1 to 65535")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3(data: bytes) -> bytes:
    try:
        from xxhash import xxh3_128_digest
    except ImportError as e:  # pragma: no cover
        raise ImportError("this algorithm needs the package xxhash; install kvatlas[hash]") from e
    return xxh3_128_digest(data)


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _pickle_block(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return _pickle((parent, tokens, None))


def _cbor_head(major: int, n: int) -> bytes:
    """The first bytes of a value in canonical CBOR (RFC 8949, 4.2): as few as possible."""
    if n < 24:
        return bytes([major << 5 | n])
    for code, form in (24, ">B"), (25, ">H"), (26, ">I"):
        if n < 1 << 8 * struct.calcsize(form):
            return bytes([major << 5 | code]) + struct.pack(form, n)
    raise ValueError(f"{n} is too large")


def _cbor_text(value: str) -> bytes:
    data = value.encode()
    return _cbor_head(3, len(data)) + data


def _cbor_block(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return b"".join((b"\x83", _cbor_head(2, len(parent)), parent, _cbor_head(4, len(tokens)),
                     *(_cbor_head(0, t) for t in tokens), b"\xf6"))
