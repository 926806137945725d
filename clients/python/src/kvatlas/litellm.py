"""A routing strategy for LiteLLM. It chooses a deployment of a model by the cached blocks and the load of the engines.

    router = litellm.Router(model_list=[
        {"model_name": "llama", "litellm_params": {"model": "hosted_vllm/llama", "api_base": "http://w1:8000/v1"},
         "model_info": {"id": "worker-1"}}, ...])
    KvatlasRouting(router, "http://indexer:8090").install()

The id of a deployment is the name of the worker. A subclass with another `worker_of` uses other names.

kvatlas chooses for asynchronous calls only. The router uses the configured strategy of LiteLLM for blocking calls, and
for calls without a choice by kvatlas.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import wraps
from inspect import isasyncgen
from typing import Any

import litellm
from litellm.types.router import CustomRoutingStrategyBase
from litellm.types.utils import all_litellm_params

from ._adapter import Chooser, fields_of, prompt_of
from ._client import Result

# _CALLS has the calls of a router with requests that count as load until the end, and the API of the requests' fields.
# None: the fields determine the API.
_CALLS: Mapping[str, str | None] = {
    "acompletion": None, "atext_completion": None, "aresponses": "responses", "anthropic_messages": None}

# _OWN has fields of LiteLLM itself that all_litellm_params lacks.
_OWN = frozenset(("timeout", "extra_headers", "extra_query", "original_function", "litellm_params", "input",
                  "additional_drop_params", "deployment_id", "specific_deployment"))


def _sent(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that LiteLLM sends to an engine."""
    return {k: v for k, v in kwargs.items()
            if v is not None and k not in all_litellm_params and k not in _OWN and not k.startswith("_litellm_")}


def _prompt(kwargs: Mapping[str, Any], deployments: Sequence[Any], api: str | None) -> dict[str, Any]:
    """Returns the prompt of a `SelectRequest`, with the fields that the deployments add.

    The result is empty if the deployments add different fields, or without a prompt.
    """
    added = [fields_of(_sent(d["litellm_params"])) for d in deployments]
    if any(a != added[0] for a in added):
        return {}
    body = {**added[0], **fields_of(_sent(kwargs))}
    if api == "responses":
        return {"api": api, "request": {**body, **fields_of({"input": kwargs.get("input")})}}
    return prompt_of(body)


class _Call:
    """_Call has the booking of a call of the router. A further try replaces the booking of the previous try."""

    def __init__(self, chooser: Chooser, api: str | None) -> None:
        self._chooser = chooser
        self.api = api
        self._booking: tuple[str, str] | None = None
        self._begun = False
        self.tried: list[str] = []  # workers

    def book(self, model: str, request_id: str) -> None:
        self.end()
        self._booking, self._begun = (model, request_id), False

    def chunk(self) -> None:
        """Reports the first token once."""
        if self._booking is not None and not self._begun:
            self._begun = True
            self._chooser.prefilled(*self._booking)

    def end(self, result: Result | None = None) -> None:
        booking, self._booking = self._booking, None
        if booking is not None:
            self._chooser.end(*booking, result)


# _current is the router's running call in this context; None: there is no counted call.
_current: ContextVar[_Call | None] = ContextVar("kvatlas_call", default=None)


class _Counted:
    """_Counted is a mixin for the class of a stream. The booking ends with the end, a failure, the close or the garbage
    collection of the stream."""

    _kvatlas_call: _Call

    async def __anext__(self) -> Any:
        call = self._kvatlas_call
        token = _current.set(call)  # LiteLLM may try another deployment in the middle of a stream
        try:
            chunk = await super().__anext__()  # type: ignore[misc]
        except BaseException as e:
            call.end("ok" if isinstance(e, StopAsyncIteration) else _failure(e))
            raise
        finally:
            with suppress(ValueError):  # the coroutine was closed in another context
                _current.reset(token)
        call.chunk()
        return chunk

    async def aclose(self) -> None:
        self._kvatlas_call.end()
        if (close := getattr(super(), "aclose", None)) is not None:
            await close()

    def __del__(self) -> None:
        self._kvatlas_call.end()
        if (delete := getattr(super(), "__del__", None)) is not None:
            delete()


async def _counted_chunks(chunks: Any, call: _Call) -> AsyncGenerator[Any, None]:
    """Does the work of _Counted for a generator, because the class of a generator cannot be changed."""
    try:
        async for chunk in chunks:
            call.chunk()
            yield chunk
    finally:
        call.end()
        await chunks.aclose()


def _until_end(response: Any, call: _Call) -> Any:
    """Returns the response, and ends the booking of the call: now, or at the end of a stream."""
    if isasyncgen(response):
        return _counted_chunks(response, call)
    if not hasattr(response, "__anext__"):
        call.end("ok")
        return response
    kind = type(response)
    response._kvatlas_call = call
    response.__class__ = type(kind.__name__, (_Counted, kind), {})
    return response


class KvatlasRouting(CustomRoutingStrategyBase):
    """KvatlasRouting chooses deployments for a router of LiteLLM. It is not active before `install`.

    - urls, client: arguments of `AsyncClient`;
    - models: names of models in kvatlas, by the name in LiteLLM; other models have the same name in both;
    - timeout: limit of a choice in seconds;
    - book: requests count as load until their end;
    - progress: seconds between two reports of a running request, less than half of `--request-expiry`.
    """

    def __init__(self, router: litellm.Router, urls: str | Sequence[str], *, models: Mapping[str, str] | None = None,
                 timeout: float = 0.25, book: bool = True, progress: float = 60.0, **client: Any) -> None:
        self._router = router
        self._models = models or {}
        self._chooser = Chooser(urls, timeout, book, client, progress)
        self._wrapped: dict[str, Any] = {}  # the router's calls before install

    def install(self) -> None:
        """Sets the strategy of the router, and wraps the router's calls to count requests."""
        self._router.set_custom_routing_strategy(self)
        for name, api in _CALLS.items():
            if (call := getattr(self._router, name, None)) is not None and name not in self._wrapped:
                self._wrapped[name] = call
                setattr(self._router, name, self._counted(call, api))

    def _counted(self, call: Callable[..., Awaitable[Any]], api: str | None) -> Callable[..., Awaitable[Any]]:
        """Returns a wrapper of a call of the router. The booking ends with the call or with the stream."""

        @wraps(call)
        async def counted(*args: Any, **kwargs: Any) -> Any:
            if _current.get() is not None:  # a nested call
                return await call(*args, **kwargs)
            of = _Call(self._chooser, api)
            token = _current.set(of)
            try:
                response = await call(*args, **kwargs)
            except BaseException as e:
                of.end(_failure(e))
                raise
            finally:
                _current.reset(token)
            return _until_end(response, of)

        return counted

    def worker_of(self, deployment: Mapping[str, Any]) -> str:
        """Returns the name of a deployment's worker."""
        return str(deployment["model_info"]["id"])

    async def async_get_available_deployment(self, model: str, messages: Any = None, input: Any = None,
                                             specific_deployment: bool | None = False,
                                             request_kwargs: dict[str, Any] | None = None) -> Any:
        request = request_kwargs if request_kwargs is not None else {}
        if not specific_deployment and (name := self._models.get(model, model)):
            deployments = await self._router.async_get_healthy_deployments(
                model=model, request_kwargs=request, messages=messages, input=input,
                specific_deployment=specific_deployment)
            if isinstance(deployments, list) and len(deployments) > 1:
                call = _current.get()
                prompt = _prompt(request if request.get("prompt") else {**request, "messages": messages}, deployments,
                                 call.api if call is not None else None)
                if chosen := await self._choose(name, deployments, prompt):
                    return chosen
        return await type(self._router).async_get_available_deployment(
            self._router, model=model, messages=messages, input=input, specific_deployment=specific_deployment,
            request_kwargs=request)

    async def _choose(self, name: str, deployments: Sequence[Any], prompt: dict[str, Any]) -> Any:
        """Returns the deployment for a request; None without a choice.

        The choice excludes deployments with an earlier try of the call, unless all deployments were tried.
        """
        if not prompt:
            return None
        by_worker = {self.worker_of(d): d for d in deployments}
        call = _current.get()  # None: a call without a wrapper, with an unknown end
        if call is not None:
            call.end(_failure(sys.exc_info()[1]))  # LiteLLM retries in the handler of the last error
        tried = call.tried if call is not None else []
        selection = await self._chooser.choose(
            model=name, workers=list(by_worker), book=call is not None, **prompt,
            excluded_workers=None if set(tried).issuperset(by_worker) else [w for w in by_worker if w in tried] or None)
        if selection is None:
            return None
        if call is not None:
            call.tried.append(selection.worker)
            if selection.booked:
                call.book(name, selection.request_id)
        return by_worker[selection.worker]

    def get_available_deployment(self, model: str, messages: Any = None, input: Any = None,
                                 specific_deployment: bool | None = False,
                                 request_kwargs: dict[str, Any] | None = None) -> Any:
        return type(self._router).get_available_deployment(
            self._router, model=model, messages=messages, input=input, specific_deployment=specific_deployment,
            request_kwargs=request_kwargs)

    async def close(self) -> None:
        """Restores the router's calls and closes the client."""
        for name, call in self._wrapped.items():
            setattr(self._router, name, call)
        await self._chooser.close()


def _failure(error: Any) -> Result | None:
    """Returns the failure of a worker for an error of LiteLLM; None: no error, or an error of the request."""
    if isinstance(error, litellm.exceptions.Timeout):
        return "timeout"
    if isinstance(error, litellm.exceptions.APIConnectionError):
        return "refused"
    return "status" if (getattr(error, "status_code", None) or 0) >= 500 else None

