"""Local hashes of a prompt's blocks, for queries without tokens. The module requires the extra `kvatlas[hash]`.

The local hash of a block is the XXH3-64 of the tokens as little-endian u32. The seed is 1337 plus the XXH3-64 of the
LoRA adapter's name (seed 0) and the XXH3-64 of the cache salt (seed 1). NVIDIA Dynamo's router has the same hashes,
except for blocks with images: the hashes of this module include the positions of images.
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
    """Returns the local hashes of a prompt's whole blocks, for `Query.hashes` and similar fields.

    block_size is in tokens, from 1 to 65,535. lookahead is the number of tokens after a block in the block's hash
    (`WorkerInfo.lookahead`), such as 1 for an engine with EAGLE.

    media[i] lists the images with a token in the hash of block i, in the order of the tokens. An image is a pair: the
    hash (`media_hash`), and the position of the image's first token, counted from the block's first token. The position
    is negative if the image begins in an earlier block. A single number is an image without a position, by the
    `mm_hash` of Dynamo. Hashes without positions match blocks of engines that publish no positions.

    Raises ValueError for an invalid token, block_size or lookahead.
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
    """Returns the sequence hashes of a prompt, for `Prompt.sequence_hashes`, from the local hashes of all blocks."""
    out: list[int] = []
    for local in hashes:
        out.append(xxh3_64_intdigest(struct.pack("<QQ", out[-1], local), seed=_SEED) if out else local)
    return out


def media_hash(identifier: str) -> int:
    """Returns the hash of an image for `block_hashes` and `MediaItem`, from the engine's identifier of the image."""
    return xxh3_64_intdigest(identifier.encode())
