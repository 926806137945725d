"""A routing strategy for LiteLLM that chooses among a model's deployments by what their engines hold and have to do.

    router = litellm.Router(model_list=[
        {"model_name": "llama", "litellm_params": {"model": "hosted_vllm/llama", "api_base": "http://w1:8000/v1"},
         "model_info": {"id": "worker-1"}}, ...])
    KvatlasRouting(router, "http://indexer:8090").install()

A deployment's id is the name of its worker; a subclass with another `worker_of` changes that. Asynchronous requests are
routed so; blocking ones, and all while kvatlas makes no choice, as the router is set to do without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.router import CustomRoutingStrategyBase
from litellm.types.utils import all_litellm_params

from ._adapter import Chooser, fields_of, prompt_of
from ._client import Result

# Names in a request's metadata: its booking, and the workers of its tries.
_KEY = "kvatlas_booking"
_TRIED = "kvatlas_tried"

# Fields that are LiteLLM's own, beside those of its list.
_OWN = frozenset(("timeout", "extra_headers", "extra_query", "original_function", "litellm_params", "input",
                  "additional_drop_params", "deployment_id", "specific_deployment"))


def _sent(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that LiteLLM sends to an engine."""
    return {k: v for k, v in kwargs.items()
            if v is not None and k not in all_litellm_params and k not in _OWN and not k.startswith("_litellm_")}


def _prompt(kwargs: Mapping[str, Any], deployments: Sequence[Any]) -> dict[str, Any]:
    """The request of a `SelectRequest`, with the fields that the deployments add. It is empty if these differ."""
    added = [fields_of(_sent(d["litellm_params"])) for d in deployments]
    if any(a != added[0] for a in added):
        return {}
    return prompt_of({**added[0], **fields_of(_sent(kwargs))})


class KvatlasRouting(CustomRoutingStrategyBase):
    """urls and client are as for `AsyncClient`; models has kvatlas' name of each model that LiteLLM calls otherwise;
    timeout is how many seconds a choice may take; book is whether requests count as load until they end."""

    def __init__(self, router: litellm.Router, urls: str | Sequence[str], *, models: Mapping[str, str] | None = None,
                 timeout: float = 0.25, book: bool = True, **client: Any) -> None:
        self._router = router
        self._models = models or {}
        self._chooser = Chooser(urls, timeout, book, client)
        self._ends = _Ends(self._chooser)

    def install(self) -> None:
        """Makes this the router's strategy."""
        self._router.set_custom_routing_strategy(self)
        litellm.logging_callback_manager.add_litellm_callback(self._ends)

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
                prompt = _prompt(request if request.get("prompt") else {**request, "messages": messages}, deployments)
                if chosen := await self._choose(name, request, deployments, prompt):
                    return chosen
        return await type(self._router).async_get_available_deployment(
            self._router, model=model, messages=messages, input=input, specific_deployment=specific_deployment,
            request_kwargs=request)

    async def _choose(self, name: str, request: dict[str, Any], deployments: Sequence[Any],
                      prompt: dict[str, Any]) -> Any:
        """The deployment for a request, which has not failed at it before; None without a choice."""
        if not prompt:
            return None
        by_worker = {self.worker_of(d): d for d in deployments}
        metadata = request.setdefault("metadata", {})
        tried = metadata.setdefault(_TRIED, [])
        selection = await self._chooser.choose(
            model=name, workers=list(by_worker), **prompt,
            excluded_workers=None if set(tried).issuperset(by_worker) else [w for w in by_worker if w in tried] or None)
        if selection is None:
            return None
        tried.append(selection.worker)
        if selection.booked:
            metadata[_KEY] = {"model": name, "request_id": selection.request_id}
            if (task := asyncio.current_task()) is not None:  # LiteLLM reports no end of a cancelled request
                task.add_done_callback(partial(self._cancelled, name, selection.request_id))
        return by_worker[selection.worker]

    def _cancelled(self, model: str, request_id: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._chooser.end(model, request_id)

    def get_available_deployment(self, model: str, messages: Any = None, input: Any = None,
                                 specific_deployment: bool | None = False,
                                 request_kwargs: dict[str, Any] | None = None) -> Any:
        return type(self._router).get_available_deployment(
            self._router, model=model, messages=messages, input=input, specific_deployment=specific_deployment,
            request_kwargs=request_kwargs)

    async def close(self) -> None:
        """Ends the client."""
        litellm.logging_callback_manager.remove_callback_from_list_by_object(litellm.callbacks, self._ends, require_self=False)
        await self._chooser.close()


def _failure(error: Any) -> Result | None:
    """The failure of a worker that an error of LiteLLM shows; None for an error of the request."""
    if isinstance(error, litellm.exceptions.Timeout):
        return "timeout"
    if isinstance(error, litellm.exceptions.APIConnectionError):
        return "refused"
    return "status" if (getattr(error, "status_code", None) or 0) >= 500 else None


class _Ends(CustomLogger):
    """Receives the ends of requests."""

    def __init__(self, chooser: Chooser) -> None:
        super().__init__()
        self._chooser = chooser

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self._end(kwargs, "ok")

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self._end(kwargs, _failure(kwargs.get("exception")))

    def _end(self, kwargs: Any, result: Result | None) -> None:
        metadata = (kwargs.get("litellm_params") or {}).get("metadata") or {}
        if booking := metadata.get(_KEY):
            self._chooser.end(booking["model"], booking["request_id"], result)
