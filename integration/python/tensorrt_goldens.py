"""Writes messages with the fields of TensorRT-LLM's publisher as test data of pkg/events: tensorrt_goldens.py. Prints a JSON list:

    {"says": description, "payload": hex, "prompt": [token], "media": [{"hash", "offset", "length"}],
     "from": index of the event's first token in the prompt, "blocks": number of blocks that a lookup can find,
     "passed": true if the event has more blocks, "lora": number}

No wheel of TensorRT-LLM exists for a CPU. The structs below declare the fields of the publisher in the same order
(tensorrt_llm/_torch/pyexecutor/kv_cache_events.py), and msgspec encodes them, as in TensorRT-LLM. The tokens and keys of a prompt are
those of gen_multimodal_cache_key_tokens and decodeEventBlock (cpp/tensorrt_llm/batch_manager/kv_cache_manager_v2/eventData.cpp). The
tokens of an image are the digest, and then STAND_IN+1, STAND_IN+2, …. A block lists every part of an image.

`go test -tags judges ./integration/judges/engines -run TensorRT -update` writes pkg/events/testdata/tensorrt.json from the output.
"""
import hashlib
import json
from typing import Any, Optional, Union

import msgspec

SIZE = 4
STAND_IN = 150_000  # the size of the vocabulary


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class MultimodalKey(msgspec.Struct, omit_defaults=True, gc=False, tag="mm_key"):
    hash: str
    start_offset: int
    uuid: Optional[str] = None


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: Optional[int]
    token_ids: list[Union[int, str]]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]
    extra_keys: Optional[list[Optional[tuple[Any, ...]]]] = None
    group_idx: Optional[int] = None
    kv_cache_spec_kind: Optional[str] = None
    kv_cache_spec_sliding_window: Optional[int] = None
    locality: Optional[str] = None
    mm_keys: Optional[list[list[MultimodalKey]]] = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: Optional[str]
    group_idx: Optional[int] = None
    locality: Optional[str] = None


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Union[BlockStored, BlockRemoved]]
    data_parallel_rank: Optional[int] = None


class Image:
    """An image with length tokens in a prompt. A token of text follows every token in gaps."""

    def __init__(self, name, length, uuid=None, gaps=()):
        self.hash, self.length, self.uuid, self.gaps = hashlib.sha256(name.encode()).hexdigest(), length, uuid, gaps


def lay(prompt):
    """Returns the tokens of a prompt from a client, the tokens in the engine with image and index, and the media."""
    sent, engine, media = [], [], []
    for part in prompt:
        if isinstance(part, int):
            sent.append(part)
            engine.append((part, None, 0))
            continue
        offset = len(sent)
        for k in range(part.length):
            sent.append(STAND_IN + k)
            engine.append((part.hash if k == 0 else STAND_IN + k, part, k))
            if k in part.gaps:
                sent.append(9)
                engine.append((9, None, 0))
        media.append(dict(hash=part.hash, offset=offset, length=len(sent) - offset))
    return sent, engine, media


def keys(block):
    out, before = [], None
    for _, image, k in block:
        if image is not None and (k == 0 or image is not before):
            out.append(MultimodalKey(hash=image.hash, start_offset=k, uuid=image.uuid))
        before = image
    return out


def stored(first, prompt, begin=0, end=None, decoded=True, lora=None):
    """Returns the event for the blocks of a prompt from begin on. The names are first, -(first+1), first+2, …"""
    _, engine, _ = lay(prompt)
    end = len(engine) // SIZE * SIZE if end is None else end
    blocks = [engine[i:i + SIZE] for i in range(begin, end, SIZE)]
    name = lambda i: (-1) ** i * (first + i)
    return BlockStored(
        block_hashes=[name(begin // SIZE + i) for i in range(len(blocks))], parent_block_hash=name(begin // SIZE - 1) if begin else None,
        token_ids=[t for b in blocks for t, _, _ in b], block_size=SIZE, lora_id=lora, medium="GPU", lora_name=None,
        mm_keys=[keys(b) for b in blocks] if decoded else None)


def placed(first, tokens, keys):
    """Returns an event with only numbers as tokens. start_offset is that of vLLM: the image's first token relative to the block."""
    return BlockStored(block_hashes=list(range(first, first + len(keys))), parent_block_hash=None, token_ids=tokens, block_size=SIZE,
                       lora_id=None, medium="GPU", lora_name=None, mm_keys=[[MultimodalKey(hash=h, start_offset=o) for h, o in k] for k in keys])


def main():
    a, b = Image("a", 3), Image("b", 3, uuid="user-7")
    long, gapped = Image("long", 9), Image("gapped", 7, gaps=(1, 4))
    text = list(range(20, 28))
    cases = []

    def case(says, event, sent, media=(), begin=0, blocks=None, lora=0):
        payload = msgspec.msgpack.Encoder().encode(KVEventBatch(ts=1.5, events=[event], data_parallel_rank=0))
        count = len(event.block_hashes) if blocks is None else blocks
        cases.append({"says": says, "payload": payload.hex(), "prompt": sent, "media": list(media), "from": begin, "blocks": count, "lora": lora, "passed": count < len(event.block_hashes)})

    def of(says, first, prompt, begin=0, end=None, blocks=None, decoded=True):
        sent, _, media = lay(prompt)
        case(says, stored(first, prompt, begin, end, decoded), sent, media if decoded else [], begin, blocks)

    of("text, and no image is decoded", 100, text, decoded=False)
    of("text beside images", 110, text)
    of("an image at a block's begin", 120, [a, 20, *text])
    of("an image within a block", 130, [20, a, *text])
    of("an image across two blocks", 140, [20, 21, a, 22, *text])
    of("an image across four blocks", 150, [20, 21, 22, long, *text])
    of("its first token is a block's last", 160, [20, 21, 22, a, 23, 24])
    of("two images in a block, one with a uuid", 170, [Image("a", 2), Image("b", 2, uuid="user-7"), *text])
    of("the same image twice in a row", 180, [20, a, a, 21])
    of("two images across blocks", 190, [20, a, b, Image("c", 5), 21, 22, 23, 24])
    of("text between an image's tokens", 200, [20, gapped, 21, 22])
    prompt = [20, 21, long, *text]
    of("the first block of an image", 210, prompt, end=SIZE)
    of("the rest of it, in a later event", 210, prompt, begin=SIZE)
    of("an image that is not decoded, after a block of text", 220, [*text[:5], a, 20, 21, 22, 23], decoded=False, blocks=1)
    of("an image that is not decoded, in the first block", 230, [20, a, 21, 22, 23, 24], decoded=False, blocks=0)
    case("an adapter's number", stored(240, text, lora=5), text, lora=5)
    h, i = a.hash, b.hash
    pad = 151655
    case("placed: within a block", placed(250, [7, pad, pad, 8, *text[:4]], [[(h, 1)], []]), [7, pad, pad, 8, *text[:4]], [dict(hash=h, offset=1, length=2)])
    case("placed: two images, the second one across blocks", placed(260, [pad, 7, pad, pad, pad, 8, 9, 9], [[(h, 0), (i, 2)], [(i, -2)]]),
         [pad, 7, pad, pad, pad, 8, 9, 9], [dict(hash=h, offset=0, length=1), dict(hash=i, offset=2, length=3)])
    case("placed: across blocks, told by the token's index", placed(270, [7, 7, pad, pad, pad, pad, pad, pad, pad, 8, 9, 9], [[(h, 2)], [(h, 2)], [(h, 6)]]),
         [7, 7, pad, pad, pad, pad, pad, pad, pad, 8, 9, 9], [dict(hash=h, offset=2, length=7)])
    case("placed: the same image twice in a block", placed(280, [pad, 7, pad, 7], [[(h, 0), (h, 2)]]),
         [pad, 7, pad, 7], [dict(hash=h, offset=0, length=1), dict(hash=h, offset=2, length=1)])
    print("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]")


if __name__ == "__main__":
    main()
