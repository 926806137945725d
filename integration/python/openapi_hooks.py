"""Hooks of schemathesis: MessagePack, and changes of requests for more accepted requests.

Only requests that the document allows are changed, except for a short deadline on requests with min_seq. The changed requests stay
allowed. Many changed requests use an existing model, worker or request. A changed request has at most a single form of the prompt.
"""

import datetime
import json
import os
import zlib

import msgpack
import schemathesis

PROMPTS = ("tokens", "hashes", "hashed", "engine_hashes", "prompt", "messages")
PROMPT = json.loads(os.environ["KVATLAS_PROMPT"])  # worker w1 holds a part of the prompt
BLOCK_SIZE = int(os.environ["KVATLAS_BLOCK_SIZE"])
MESSAGES = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")

THINNED = ("/v1/find", "/v1/select", "/v1/book", "/v1/potential_loads", "/v1/workers")
KEPT = ("model", "request_id", "worker", "rank", "instance", "block_size", "events", "tokens", "hashes")


@schemathesis.serializer("application/msgpack")
def pack(context, value):
    try:
        return msgpack.packb(value)
    except (OverflowError, TypeError, ValueError):
        return b"\xc1"  # an invalid byte of MessagePack, for a value without an encoding


@schemathesis.deserializer("application/msgpack")
def unpack(context, response):
    return timed(msgpack.unpackb(response.content, strict_map_key=False, timestamp=3))


def timed(value):
    """Returns the value with times as texts, as in JSON."""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {key: timed(v) for key, v in value.items()}
    return [timed(v) for v in value] if isinstance(value, list) else value


@schemathesis.hook
def before_call(context, case, kwargs):
    body = case.body
    if isinstance(body, dict) and body.get("min_seq"):
        case.headers.setdefault("Kv-Deadline-Ms", "50")  # the server blocks until it reaches min_seq
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if len(case.path_parameters.get("instance", "")) % 2:
        case.path_parameters["instance"] = "w2"
    if isinstance(body, dict):
        lead(body, case.operation.path)


def lead(body, path):
    if len(body.get("model") or "") % 4:
        body["model"] = "m"
    if len(body.get("request_id") or "") % 4:
        body["request_id"] = "r%d" % (len(body["request_id"]) % 3)
    if path == "/v1/book" and len(body["request_id"]) % 3:
        body["worker"], body["rank"] = "w1", 0
    if path != "/v1/workers":
        body.pop("block_size", None)
    elif body.get("model") == "m":
        body["block_size"] = BLOCK_SIZE
    for name in sorted(body):  # a request with all fields always has a contradiction
        if path in THINNED and name not in KEPT and zlib.crc32((name + str(body[name])).encode()) % 4:
            del body[name]
    for name in [name for name in ("workers", "ranks", "endpoints") if body.get(name) is not None][1:]:
        del body[name]
    if body.get("advisory"):
        body.pop("book", None)
    if body.get("disaggregated"):
        body.pop("role", None)
    if body.get("add_generation_prompt"):
        body.pop("continue_final_message", None)
    given = [name for name in PROMPTS if body.get(name) is not None]
    for name in given[1:]:
        del body[name]
    if not given and path in ("/v1/find", "/v1/select") or given[:1] == ["tokens"] and len(body["tokens"]) % 2:
        given, body["tokens"] = ["tokens"], PROMPT
    if given:
        for name in ("isl_tokens", "sequence_hashes"):
            body.pop(name, None)
    if given[:1] == ["engine_hashes"]:
        body.pop("explain", None)
    if given[:1] not in (["tokens"], ["prompt"], ["messages"]):
        for name in ("lora_name", "cache_salt"):
            body.pop(name, None)
    end = 0
    for item in body.get("media") or []:  # items are in order and within the tokens
        item["offset"] = end + item["offset"] % 3
        item["length"] = 1 + item["length"] % 2
        end = item["offset"] + item["length"]
    if given[:1] != ["tokens"] or end > len(body["tokens"]):
        body.pop("media", None)
    if given[:1] != ["messages"]:
        for name in MESSAGES:
            body.pop(name, None)
