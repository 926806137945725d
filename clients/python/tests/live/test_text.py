"""Prompts as text, of which the indexer makes tokens."""

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
