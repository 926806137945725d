"""A request router for Ray Serve LLM. The router chooses replicas by the cached blocks and the load of the engines.

    deployment_config=dict(request_router_config=dict(
        request_router_class="kvatlas.ray:KvatlasRouter",
        request_router_kwargs=dict(urls=["http://indexer:8090"], model="llama")))

The engine of each replica is a worker of kvatlas. The name of the worker, in the shim or the registration, is the
unique id of the replica (`serve.get_replica_context().replica_id.unique_id`). A subclass with another `worker_of` uses
other names.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import (
    FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica,
)

from ._adapter import Chooser, fields_of, prompt_of
from ._client import Result

# _TOKENS is the keyword argument of a request with the prompt's tokens from Ray's ingress.
_TOKENS = "request_token_ids"

# _MAX_TRIED bounds the requests with recorded failed workers. The router drops the oldest records.
_MAX_TRIED = 1000


class KvatlasRouter(FIFOMixin, RequestRouter):
    """KvatlasRouter ranks the replica of kvatlas' choice before two random replicas. Without a choice, only two random
    replicas are candidates."""

    def initialize_state(self, urls: str | Sequence[str], model: str, timeout: float = 0.25, book: bool = True,
                         role: str | None = None, progress: float = 60.0, **client: Any) -> None:
        """Initializes the router. The arguments are `request_router_kwargs` of the deployment:

        - urls: URLs of the indexers, as in `AsyncClient`;
        - model: name of the model in kvatlas;
        - timeout: limit of a choice in seconds;
        - book: requests count as load until their end;
        - role: role of the deployment's workers; a deployment of prefill workers requires `prefill`;
        - progress: seconds between two reports of a running request, less than half of `--request-expiry`;
        - client: further options of `AsyncClient`.
        """
        self._model, self._role = model, role
        self._chooser = Chooser(urls, timeout, book, client, progress)
        self._booked: dict[str, tuple[str, ReplicaID]] = {}  # bookings and chosen replicas, by Ray's ids of requests
        self._workers: dict[ReplicaID, str] = {}  # of the candidates
        self._tried: dict[str, set[str]] = {}  # workers that failed, by Ray's ids of requests

    def worker_of(self, replica: RunningReplica) -> str:
        """Returns the name of a replica's worker."""
        return str(replica.replica_id.unique_id)

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        """Returns ranked groups of replicas. Ray sends the request to the first group with a free replica."""
        if not candidate_replicas:
            return []
        by_worker = {self.worker_of(r): r for r in candidate_replicas}
        self._workers = {r.replica_id: w for w, r in by_worker.items()}
        chosen = None
        if pending_request is not None and (prompt := _prompt(pending_request)):
            key = pending_request.metadata.internal_request_id
            self._release(key)  # the replicas of the previous choice had no room
            tried = [w for w in by_worker if w in self._tried.get(key, ())]
            selection = await self._chooser.choose(
                model=self._model, workers=list(by_worker), role=self._role, **prompt,
                excluded_workers=tried if 0 < len(tried) < len(by_worker) else None)
            chosen = by_worker.get(selection.worker) if selection is not None else None
            if selection is not None and selection.booked:
                self._book(pending_request, key, selection.request_id, chosen)
        others = [r for r in candidate_replicas if r is not chosen]
        rest = random.sample(others, min(2, len(others)))
        groups = [[chosen], rest] if chosen is not None else [rest]
        return [group for group in groups if group]

    def _book(self, pending: PendingRequest, key: str, request_id: str, chosen: RunningReplica | None) -> None:
        """Records a booking, and ends the booking of a request that is cancelled before the end of the routing."""
        if chosen is None or pending.future.done():
            self._chooser.end(self._model, request_id)
            return
        self._booked[key] = request_id, chosen.replica_id

        def routed(future: Any) -> None:
            if self._booked.get(key, ("",))[0] == request_id and future.cancelled():
                self._release(key)

        pending.future.add_done_callback(routed)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Ends the booking of a request that Ray sent to another replica than the chosen replica."""
        key = pending_request.metadata.internal_request_id
        if key in self._booked and self._booked[key][1] != replica_id:
            self._release(key)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ends the booking of a completed request."""
        self._release(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Reports a dead replica, so that other routers avoid the worker too."""
        super().on_replica_actor_died(replica_id)
        self._failed(replica_id, "broken")

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Reports an unavailable replica. Ray keeps the replica as a candidate."""
        super().on_replica_actor_unavailable(replica_id)
        self._failed(replica_id, "refused")

    def _failed(self, replica_id: ReplicaID, result: Result) -> None:
        """Penalises the worker of a replica, and excludes the worker from further tries of the replica's requests."""
        if (worker := self._workers.get(replica_id)) is None:
            return
        for key in [k for k, (_, chosen) in self._booked.items() if chosen == replica_id]:
            self._tried.setdefault(key, set()).add(worker)
        while len(self._tried) > _MAX_TRIED:
            del self._tried[next(iter(self._tried))]
        self._chooser.failed(worker, result)

    def _release(self, key: str) -> None:
        if booking := self._booked.pop(key, None):
            self._chooser.end(self._model, booking[0])


def _prompt(pending: PendingRequest) -> dict[str, Any]:
    if pending.metadata.multiplexed_model_id:
        return {}  # a LoRA adapter: Ray does not provide the engine's name of the adapter
    if tokens := pending.kwargs.get(_TOKENS):
        body = fields_of(pending.args[0]) if pending.args else {}
        api = "chat" if body.pop("messages", None) else "completions"
        body.pop("prompt", None)
        return {"tokens": tokens, "api": api, "request": body}
    for arg in pending.args:
        if found := prompt_of(arg):
            return found
    return {}
