"""Hashes of a prompt's blocks, so that its tokens stay where they are. Needs the extra `kvatlas[hash]`.

A block's local hash is the XXH3-64 of its tokens as little-endian u32, with the seed 1337, to which the XXH3-64 of a
LoRA's name (seed 0) and of a cache salt (seed 1) are added. These are the hashes of NVIDIA Dynamo's router, but for
blocks with images, whose places we hash too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from ._tokens import pack

try:
    from xxhash import xxh3_64_intdigest
except ImportError as e:  # pragma: no cover
    raise ImportError("kvatlas.hashing needs the package xxhash; install kvatlas[hash]") from e

_SEED = 1337
_MASK = (1 << 64) - 1
_NO_PLACE = -1 << 63


def block_hashes(tokens: Iterable[int], block_size: int, *, lora_name: str = "", cache_salt: str = "",
                 lookahead: int = 0, media: Sequence[Iterable[int | tuple[int, int]]] = ()) -> list[int]:
    """The local hashes of a prompt's whole blocks, for `Query.hashes` and the like.

    lookahead is how many tokens beyond a block its engine reads (`WorkerInfo.lookahead`): with EAGLE, one.
    media[i] has the images that touch what is hashed of block i, in the order of their tokens: each one's hash
    (`media_hash`) and the place of its first token, counted from the block's first one, negative if that is in a block
    before. A number alone is an image without a place, by the `mm_hash` that Dynamo has of it: so hashed, prompts find
    blocks of engines that do not say the places.
    """
    if not 1 <= block_size <= 65535:
        raise ValueError(f"block_size is {block_size}, not from 1 to 65535")
    if lookahead < 0:
        raise ValueError(f"lookahead is {lookahead}, less than 0")
    data = pack(tokens)
    step, window = 4 * block_size, 4 * (block_size + lookahead)
    seed = _SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), seed=0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), seed=1)
    seed &= _MASK
    count = max(0, len(data) - 4 * lookahead) // step
    if not media:
        return [xxh3_64_intdigest(data[i:i + window], seed=seed) for i in range(0, count * step, step)]
    hashes = []
    for i in range(count):
        block = bytes(data[i * step:i * step + window])
        items = [item if isinstance(item, tuple) else (item, _NO_PLACE) for item in media[i]] if i < len(media) else []
        if len(items) == 1 and items[0][1] == _NO_PLACE:
            block += struct.pack("<Q", items[0][0])
        elif items:
            block += b"".join(struct.pack("<Qq", *item) for item in items) + b"\x01"
        hashes.append(xxh3_64_intdigest(block, seed=seed))
    return hashes


def sequence_hashes(hashes: Sequence[int]) -> list[int]:
    """The sequence hashes of a prompt, for `Prompt.sequence_hashes`, from the local hashes of all its blocks."""
    out: list[int] = []
    for local in hashes:
        out.append(xxh3_64_intdigest(struct.pack("<QQ", out[-1], local), seed=_SEED) if out else local)
    return out


def media_hash(identifier: str) -> int:
    """The number by which an image enters its blocks' hashes, from the identifier that the engine gives it."""
    return xxh3_64_intdigest(identifier.encode())
