"""The engines' own hashes of blocks. The engines' own code computed the expected values."""

from __future__ import annotations

import pytest

from kvatlas.engine_hashes import sglang_hashes, vllm_hashes


def test_sglang() -> None:
    assert sglang_hashes(range(1, 11), 4) == [-3488128144981237669, 5674439469042975057]
    assert sglang_hashes(range(1, 9), 4, cache_salt="tenant-a") == [3718046898735569995, 3308615664605479373]
    assert sglang_hashes(range(10, 15), 2, eagle=True) == [5466950378642257630, 8479033070664208866]
    assert sglang_hashes(range(1, 10), 4, eagle=True) == [-638950109823820341, -4369944537645631836]
    assert sglang_hashes([151643, 151644, 2**32 - 1, 65536], 2) == [3643201804372963924, 515838746554587362]
    assert sglang_hashes(range(128), 64) == [-96911884851298857, 1591924853584125585]
    assert sglang_hashes([7, 8, 9], 2) == [2088192425729689657]
    assert sglang_hashes([7], 2) == [] == sglang_hashes([], 1, eagle=True)


def test_sglang_adapters() -> None:
    base, adapter = [-3488128144981237669, 5674439469042975057], "0123456789abcdef0123456789abcdef"
    of = range(1, 9)
    assert sglang_hashes(range(1, 11), 4, lora_id=adapter) == [4547751747808663626, -6983363293199535932]
    assert sglang_hashes(of, 4, lora_id=adapter, event_format="dynamo", release="0.5.22") == [
        4547751747808663626, -6983363293199535932]
    assert sglang_hashes(of, 4, lora_name="sql", lora_id=adapter, extra_key="k") == [
        -2192604783659098102, -3762748864341023683]
    assert sglang_hashes(of, 4, lora_name="sql", lora_path="/models/sql") == [
        4090818790761583452, -7748924674704588443]
    assert sglang_hashes(of, 4, lora_name="org/sql") == [-8731042732655786011, 15666925755332391]
    # In the default format, 0.5.22 publishes the base model's hashes, and no release includes an extra_key.
    assert sglang_hashes(of, 4, lora_id=adapter, release="0.5.22") == base == sglang_hashes(of, 4, extra_key="k")
    assert sglang_hashes(of, 4, cache_salt="tenant-a", event_format="dynamo") == [
        8062630728818998546, 3750075681264119977]
    assert sglang_hashes(of, 4, extra_key="", event_format="dynamo") == [1344578653995646711, -493686890960786601]


@pytest.mark.parametrize(("algorithm", "seed", "want"), [
    ("sha256", "0", [10362225831949560093, 12472515041799373675]),
    ("sha256_cbor", "0", [2164874634404590027, 17270480062156288726]),
    ("xxhash", "0", [5138823041740264343, 1324190186712315504]),
    ("xxhash_cbor", "0", [1560721706249274670, 16652244415917022755]),
    ("sha256", "vllm-none-hash", [1882140585328457242, 15284023028817948126]),
    ("sha256_cbor", "vllm-none-hash", [9561501211280363793, 15292913576410714033]),
])
def test_vllm(algorithm: str, seed: str, want: list[int]) -> None:
    assert vllm_hashes(range(1, 9), 4, algorithm=algorithm, seed=seed) == want
    assert vllm_hashes(range(1, 12), 4, algorithm=algorithm, seed=seed) == want


def test_vllm_of_large_tokens() -> None:
    assert vllm_hashes([100, 300, 70000, 151643], 4, seed="0") == [5521679397376626514]


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        vllm_hashes([1], 1, algorithm="xxhash")
    with pytest.raises(ValueError, match="sha256_cbor"):
        vllm_hashes([1], 1, algorithm="builtin")
    with pytest.raises(ValueError, match="from 0.5.22 on"):
        sglang_hashes([1], 1, event_format="dynamo", release="0.5.21")
    with pytest.raises(ValueError, match="not default or dynamo"):
        sglang_hashes([1], 1, event_format="vllm")
    with pytest.raises(ValueError, match="not a version"):
        sglang_hashes([1], 1, release="latest")
    for size in 0, 65536:
        with pytest.raises(ValueError, match="page_size"):
            sglang_hashes([1], size)
        with pytest.raises(ValueError, match="block_size"):
            vllm_hashes([1], size)
    with pytest.raises(ValueError, match="not an unsigned 32-bit number"):
        sglang_hashes([-1], 1)
