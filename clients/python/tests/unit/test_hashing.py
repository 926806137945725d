"""Local hashes of blocks. The golden values are from pkg/events. The tests in tests/live compare many more hashes."""

from __future__ import annotations

import array

import pytest

from kvatlas.hashing import block_hashes, media_hash, sequence_hashes


def test_blocks() -> None:
    tokens = list(range(100))
    hashes = block_hashes(tokens, 16)
    assert len(hashes) == 6
    assert block_hashes(array.array("q", tokens), 16) == block_hashes(iter(tokens), 16) == hashes
    assert block_hashes(tokens[:32], 16) == hashes[:2] == block_hashes(tokens[:47], 16)
    assert block_hashes(tokens[:15], 16) == []
    assert len(block_hashes(tokens[:32], 16, lookahead=1)) == 1
    assert len({block_hashes(tokens, 16, **kw)[0] for kw in
                ({}, {"lora_name": "a"}, {"cache_salt": "a"}, {"lookahead": 1}, {"media": [[7]]})}) == 5
    golden: list[tuple[list[list[int | tuple[int, int]]], int]] = [
        ([[42]], 6100948656312251355), ([[(42, 0)]], 2117319670889744571), ([[(42, 1)]], 9659140180895511161),
        ([[(42, -3)]], 11338092855403261866), ([[(42, 0), (43, 1)], []], 11360654830478593672),
        ([[(43, 0), (42, 1)]], 3884491956456615948), ([[42, 43]], 1598710929150674555),
    ]
    for media, want in golden:
        assert block_hashes([0, 1], 2, media=media) == [want]
    assert sequence_hashes([]) == [] and sequence_hashes(hashes)[0] == hashes[0]
    assert len({media_hash(s) for s in ("a" * 64, "A" * 64, "a" * 63 + "b", "a")}) == 4


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [1.5]])
def test_invalid_tokens(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="not an unsigned 32-bit number"):
        block_hashes(tokens, 16)


def test_bad_sizes() -> None:
    for size in 0, 65536:
        with pytest.raises(ValueError, match="block_size"):
            block_hashes([1], size)
