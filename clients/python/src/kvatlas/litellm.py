"""A routing strategy for LiteLLM that chooses among a model's deployments by what their engines hold and have to do.

    router = litellm.Router(model_list=[
        {"model_name": "llama", "litellm_params": {"model": "hosted_vllm/llama", "api_base": "http://w1:8000/v1"},
         "model_info": {"id": "worker-1"}}, ...])
    KvatlasRouting(router, "http://indexer:8090").install()

A deployment's id is the name of its worker; a subclass with another `worker_of` changes that. Asynchronous requests are
routed so; blocking ones, and all while kvatlas makes no choice, as the router is set to do without.
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

# The calls of a router whose requests count as load until they end, with the API of their fields; None: the fields
# decide.
_CALLS: Mapping[str, str | None] = {
    "acompletion": None, "atext_completion": None, "aresponses": "responses", "anthropic_messages": None}

# Fields that are LiteLLM's own, beside those of its list.
_OWN = frozenset(("timeout", "extra_headers", "extra_query", "original_function", "litellm_params", "input",
                  "additional_drop_params", "deployment_id", "specific_deployment"))


def _sent(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that LiteLLM sends to an engine."""
    return {k: v for k, v in kwargs.items()
            if v is not None and k not in all_litellm_params and k not in _OWN and not k.startswith("_litellm_")}


def _prompt(kwargs: Mapping[str, Any], deployments: Sequence[Any], api: str | None) -> dict[str, Any]:
    """The prompt of a `SelectRequest`, with the fields that the deployments add. It is empty if these differ."""
    added = [fields_of(_sent(d["litellm_params"])) for d in deployments]
    if any(a != added[0] for a in added):
        return {}
    body = {**added[0], **fields_of(_sent(kwargs))}
    if api == "responses":
        return {"api": api, "request": {**body, **fields_of({"input": kwargs.get("input")})}}
    return prompt_of(body)


class _Call:
    """The booking of one call of the router. A further try replaces the booking of the try before."""

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


# The call of the router that runs in this context.
_current: ContextVar[_Call | None] = ContextVar("kvatlas_call", default=None)


class _Counted:
    """A mixin for the class of a stream: the booking ends when the stream ends, fails, is closed or is collected."""

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
    """Is _Counted for a generator, whose class cannot be changed."""
    try:
        async for chunk in chunks:
            call.chunk()
            yield chunk
    finally:
        call.end()
        await chunks.aclose()


def _until_end(response: Any, call: _Call) -> Any:
    """Ends the call's booking with the response: now, or at the end of the stream."""
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
    """Chooses deployments. urls and client are the arguments of `AsyncClient`. models maps LiteLLM's names of models to
    kvatlas' names. timeout bounds the seconds of a choice. book makes requests count as load until they end. progress
    is the time in seconds between two reports that a request is running, less than half of `--request-expiry`."""

    def __init__(self, router: litellm.Router, urls: str | Sequence[str], *, models: Mapping[str, str] | None = None,
                 timeout: float = 0.25, book: bool = True, progress: float = 60.0, **client: Any) -> None:
        self._router = router
        self._models = models or {}
        self._chooser = Chooser(urls, timeout, book, client, progress)
        self._wrapped: dict[str, Any] = {}  # the router's calls before install

    def install(self) -> None:
        """Makes this the router's strategy."""
        self._router.set_custom_routing_strategy(self)
        for name, api in _CALLS.items():
            if (call := getattr(self._router, name, None)) is not None and name not in self._wrapped:
                self._wrapped[name] = call
                setattr(self._router, name, self._counted(call, api))

    def _counted(self, call: Callable[..., Awaitable[Any]], api: str | None) -> Callable[..., Awaitable[Any]]:
        """Returns a call of the router whose booking ends with the call or with its stream."""

        @wraps(call)
        async def counted(*args: Any, **kwargs: Any) -> Any:
            if _current.get() is not None:  # a call within a call
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
        """The name of a deployment's worker."""
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
        """Returns the deployment for a request, one that has not failed before if there is one; None without a choice."""
        if not prompt:
            return None
        by_worker = {self.worker_of(d): d for d in deployments}
        call = _current.get()  # None: another call, whose end is unknown
        if call is not None:
            call.end(_failure(sys.exc_info()[1]))  # LiteLLM tries again while it handles the error of the try before
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
    """The failure of a worker that an error of LiteLLM shows; None for an error of the request."""
    if isinstance(error, litellm.exceptions.Timeout):
        return "timeout"
    if isinstance(error, litellm.exceptions.APIConnectionError):
        return "refused"
    return "status" if (getattr(error, "status_code", None) or 0) >= 500 else None

