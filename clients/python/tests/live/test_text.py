"""Prompts as text. The indexer makes the tokens."""

from __future__ import annotations

from typing import Any

from kvatlas import Client, Query, SelectRequest

from .conftest import patiently


def test_text(world: Any, client: Client) -> None:
    for query in (
        Query("m", prompt="warm", return_token_ids=True),
        Query("m", messages=[{"role": "user", "content": "warm"}], tools=[], return_token_ids=True),
    ):
        answer = patiently(lambda: client.find(query))
        assert answer.tokenized and answer.token_ids == tuple(world["prompt"]) and not answer.tokenize_error
        assert (answer.workers[0].instance, answer.workers[0].device) == ("w1", world["depth"])
    chosen = patiently(lambda: client.select(SelectRequest("m", prompt="warm")))
    assert (chosen.worker, chosen.tokenized, chosen.prompt_tokens) == ("w1", True, len(world["prompt"]))
    plain = patiently(lambda: client.find(Query("m", tokens=world["prompt"])))
    assert plain.tokenized is None and plain.token_ids is None


def test_request(world: Any, client: Client) -> None:
    """The indexer applies the effect of each field of a request, and reports unsupported fields."""
    chat = {"messages": [{"role": "user", "content": "warm"}], "temperature": 0.5}
    held = patiently(lambda: client.select(SelectRequest("m", request=chat)))
    assert (held.worker, held.tokenized, held.unsupported_fields) == ("w1", True, ())
    assert held.prompt_tokens == len(world["prompt"]) and held.device == world["depth"]
    more: dict[str, Any]
    for more in {"cache_salt": "tenant"}, {"lora_path": "adapter"}:
        other = patiently(lambda: client.select(SelectRequest("m", request={**chat, **more})))
        assert (other.tokenized, other.device) == (True, 0)
    for more in {"extra_key": "k"}, {"Messages": []}, {"thinking": {"type": "enabled"}}:
        unknown = patiently(lambda: client.select(SelectRequest("m", request={**chat, **more})))
        assert (unknown.tokenized, unknown.device, unknown.unsupported_fields) == (False, 0, tuple(more))
        answer = patiently(lambda: client.find(Query("m", request={**chat, **more})))
        assert answer.unsupported_fields == tuple(more) and not answer.workers
    tokens = patiently(lambda: client.select(
        SelectRequest("m", tokens=world["prompt"], api="chat", request={"cache_salt": "tenant"})))
    assert (tokens.tokenized, tokens.device, tokens.isl_tokens) == (True, 0, len(world["prompt"]))
