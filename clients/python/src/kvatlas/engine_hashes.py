"""The engines' own hashes of a prompt's blocks, as in events, for `Query.engine_hashes` and similar fields.

The functions compute the hashes from tokens, as the engines' own code does. Only vLLM's xxHash algorithms require the
extra `kvatlas[hash]`. A router that already has the engine's hashes can send them without this module. The local hashes
of `kvatlas.hashing.block_hashes` are faster, and valid for all engines. Use this module if a client may send only the
engine's hashes.
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
    """Returns SGLang's hashes of a prompt's whole pages, as signed numbers of 64 bits.

    A hash is the first 8 bytes of the SHA-256 over the digest of the previous page and the page's tokens. release is
    the version of the engine. event_format, `default` or `dynamo`, is `"format"` in the engine's `--kv-events-config`.

    SGLang identifies an adapter by an id. For an adapter in `--lora-paths`, SGLang computes the id from name and path:
    set lora_name and lora_path. For an entry without a name, set lora_name to the path. An adapter that was loaded
    later has a random id: set lora_id to the 32 hexadecimal digits. extra_key is the field of the request. In the
    default format, releases before 0.5.23 publish an adapter's pages with the hashes of the base model.

    eagle means that a page consists of pairs of tokens.

    Raises ValueError for an invalid token, page_size, release or event_format.

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
    """Returns the prefix of a second hash of each page; empty: SGLang publishes the first hash unchanged."""
    if event_format not in ("default", "dynamo"):
        raise ValueError(f"event_format is {event_format!r}, not default or dynamo")
    version = _version(release)
    if event_format == "dynamo" and version < (0, 5, 22):
        raise ValueError(f"event_format dynamo exists in SGLang from 0.5.22 on; release is {release!r}")
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
    """Returns the numbers of a release: (0, 5, 22) for 0.5.22.post1."""
    numbers = re.match(r"\d+(\.\d+)*", release)
    if not numbers:
        raise ValueError(f"release is {release!r}, not a version like 0.5.23")
    return tuple(int(n) for n in numbers[0].split("."))


def vllm_hashes(tokens: Iterable[int], block_size: int, *, algorithm: str = "sha256",
                seed: str = "vllm-none-hash") -> list[int]:
    """Returns vLLM's hashes of a prompt's whole blocks in events: the last 8 bytes of the blocks' digests.

    The prompt has no LoRA adapter, cache salt or image. algorithm is the engines' `--prefix-caching-hash-algo`: sha256,
    sha256_cbor, xxhash or xxhash_cbor. seed is the engines' PYTHONHASHSEED. The default is the fixed seed of SHA-256 in
    engines without PYTHONHASHSEED, from release 0.29 on. Older engines, and all engines with xxHash, have a random seed
    in each process if PYTHONHASHSEED is not set. Hashes with a random seed cannot be computed elsewhere.

    Raises ValueError for an invalid token, block_size or algorithm, and ImportError for xxHash without the extra.

    Source: `hash_block_tokens` and `init_none_hash` in vllm/v1/core/kv_cache_utils.py.
    """
    _check(block_size, "block_size")
    family, _, form = algorithm.partition("_")
    if family not in ("sha256", "xxhash") or form not in ("", "cbor"):
        raise ValueError(f"algorithm is {algorithm!r}, not sha256, sha256_cbor, xxhash or xxhash_cbor")
    if family == "xxhash" and seed == "vllm-none-hash":
        raise ValueError("xxhash has no fixed seed; set seed to the PYTHONHASHSEED of the engines")
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
    """Returns the first bytes of a value in canonical CBOR (RFC 8949, 4.2), in the shortest form."""
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
