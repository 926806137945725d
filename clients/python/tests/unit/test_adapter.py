"""The fields that adapters send for a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvatlas._adapter import fields_of, prompt_of

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "x"}]


class Model:
    """Model has the methods of a pydantic model that the adapters use."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {k: v for k, v in self.fields.items() if v is not None or not options.get("exclude_none")}

    def __iter__(self) -> Any:
        return iter(self.fields.items())


def test_all_fields_are_sent() -> None:
    body = {"messages": CHAT, "cache_salt": "s", "reasoning_effort": "high", "unknown": [1.5, {"a": None}]}
    assert prompt_of({"model": "m", **body, "tools": None}) == {"request": body}
    assert prompt_of(SimpleNamespace(**body)) == {"request": body}
    assert prompt_of(Model(model="m", **{**body, "messages": [Model(**CHAT[0], name=None)]})) == {"request": body}
    assert prompt_of({"prompt": [1, 2], "add_special_tokens": False}) == {
        "request": {"prompt": [1, 2], "add_special_tokens": False}}


def test_extra_body_is_merged() -> None:
    extra = {"cache_salt": "s", "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_of({"messages": CHAT, "extra_body": extra}) == {"request": {"messages": CHAT, **extra}}


def test_requests_without_a_prompt() -> None:
    request: Any
    for request in ({}, {"input": "x"}, {"messages": []}, {"prompt": ""}, None, 7, "text"):
        assert prompt_of(request) == {}


def test_values_that_are_not_json() -> None:
    assert fields_of({"prompt": "x", "response_format": Model}) == {
        "prompt": "x", "response_format": "type, which is not JSON"}
    assert fields_of({"messages": iter(CHAT), "tools": (1, "a")}) == {"messages": CHAT, "tools": [1, "a"]}
