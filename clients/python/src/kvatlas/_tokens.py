"""Tokens as bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack(tokens: Iterable[int]) -> memoryview:
    """Returns tokens as little-endian u32. Raises ValueError for a token that is not an unsigned 32-bit number."""
    if hasattr(tokens, "tolist"):  # an array, such as of NumPy
        tokens = tokens.tolist()
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as e:
        raise ValueError(f"a token is not an unsigned 32-bit number: {e}") from e
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed.tobytes())
