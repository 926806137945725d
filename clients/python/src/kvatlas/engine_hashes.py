"""The names that engines give to a prompt's blocks in their events, for `Query.engine_hashes` and the like.

A router that has them already sends those. These functions make them from tokens, as the engines' own code does; only
vLLM's xxHash algorithms need the extra `kvatlas[hash]`. To ask by `kvatlas.hashing.block_hashes` is faster, and serves
for all engines: use these where nothing else than the engine's names may be sent.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import struct
import uuid
from collections.abc import Callable, Iterable

from ._tokens import pack


def sglang_hashes(tokens: Iterable[int], page_size: int, *, lora_name: str = "", lora_path: str = "",
                  lora_id: str = "", extra_key: str | None = None, cache_salt: str = "", eagle: bool = False,
                  release: str = "0.5.23", event_format: str = "default") -> list[int]:
    """The names of SGLang's pages: the first 8 bytes, signed, of SHA-256 over the page before and the page's tokens.

    release and event_format are the engine's: the format is `"format"` in its `--kv-events-config`.

    An adapter is named by its id. SGLang makes the id of an adapter in `--lora-paths` from its name and path: give
    lora_name and lora_path. An adapter without a name there has its path as the name: give it as lora_name. An adapter
    that was loaded later has a random id: give it as lora_id, 32 hexadecimal digits. extra_key is the field of the
    request. In the default format, releases before 0.5.23 give an adapter's pages the names of the base model's.

    eagle: the pages are of pairs of tokens.

    Source: `get_hash_str` and `hash_str_to_int64` in SGLang's srt/mem_cache/utils.py, `KVCacheEventRecorder` in
    srt/mem_cache/events.py, `kv_event_namespace_seed` in srt/disaggregation/kv_events.py and
    `LoRARef.deterministic_id` in srt/lora/lora_registry.py.
    """
    _check(page_size, "page_size")
    data = bytes(pack(tokens))
    if eagle:
        data = b"".join(data[i:i + 8] for i in range(0, len(data) - 4, 4))
    step = page_size * (8 if eagle else 4)
    prior = hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest() if cache_salt else b""
    if lora_name and not lora_id:
        lora_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{lora_name}\0{lora_path or lora_name}").hex
    namespace = _sglang_namespace(lora_id, extra_key, cache_salt, release, event_format)
    names = []
    for i in range(0, len(data) - step + 1, step):
        prior = hashlib.sha256(prior + data[i:i + step]).digest()
        name = prior[:8]
        if namespace:
            name = hashlib.sha256(namespace + name).digest()[:8]
        names.append(int.from_bytes(name, "big", signed=True))
    return names


def _sglang_namespace(lora_id: str, extra_key: str | None, cache_salt: str, release: str, event_format: str) -> bytes:
    """What SGLang hashes a page's name with; empty if it publishes the name as it is."""
    if event_format not in ("default", "dynamo"):
        raise ValueError(f"event_format is {event_format!r}, not default or dynamo")
    version = _version(release)
    if event_format == "dynamo" and version < (0, 5, 22):
        raise ValueError(f"event_format is dynamo, which SGLang has from 0.5.22 on, and release is {release!r}")
    key = extra_key
    if lora_id:
        key = (extra_key or "") + lora_id
    salt: str | None = cache_salt or None
    if event_format == "default":
        salt = None
        if not lora_id or version < (0, 5, 23):
            key = None
    if key is None and salt is None:
        return b""
    digest = hashlib.sha256(b"sglang-kv-event-namespace-v1")
    for part in (key, salt):
        if part is None:
            digest.update(b"\x00")
        else:
            text = part.encode()
            digest.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


def _version(release: str) -> tuple[int, ...]:
    """A release as numbers: (0, 5, 22) of 0.5.22.post1."""
    numbers = re.match(r"\d+(\.\d+)*", release)
    if not numbers:
        raise ValueError(f"release is {release!r}, not a version like 0.5.23")
    return tuple(int(n) for n in numbers[0].split("."))


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
