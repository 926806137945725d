"""The client of kvatlas. It finds the workers that hold a prompt's blocks, and chooses a worker for a request.

    from kvatlas import Client, Query

    with Client("http://127.0.0.1:8090") as client:
        answer = client.find(Query("llama", tokens=tokens))
        for worker in answer.workers:  # best first
            print(worker.instance, worker.rank, worker.device, worker.host)

`AsyncClient` has the same methods for an event loop. The clients retry requests by the rules of docs/client.md. A
failed request raises a `KvatlasError`. `kvatlas.errors` has a class for each code of the server.
"""

from . import errors
from ._client import AsyncClient, Client
from ._messages import (
    L3, Answer, Booking, BookRequest, BrokenBlock, ClusterStatus, Disaggregation, HeldRun, IndexStatus, KVSource, Lease,
    LoadList, MediaItem, ModelLoads, ModelStatus, NodeStatus, Overlap, Overrides, PartitionDetail, PartitionSeq, PartitionStatus, Path,
    PathGroup, PotentialList, PotentialLoad, Prompt, Query, RankLoad, RankPlace, RegionPrefix, Selection, SelectRequest,
    Session, SessionBinding, SessionHolding, SessionList, Status, Target, TierCounts, WorkerInfo, WorkerList,
    WorkerLoad, WorkerRecord,
)
from .errors import KvatlasError

__all__ = [
    "L3", "Answer", "AsyncClient", "BookRequest", "Booking", "BrokenBlock", "Client", "ClusterStatus",
    "Disaggregation", "HeldRun", "IndexStatus", "KVSource", "KvatlasError", "Lease", "LoadList", "MediaItem", "ModelLoads",
    "ModelStatus", "NodeStatus", "Overlap", "Overrides", "PartitionDetail", "PartitionSeq", "PartitionStatus", "Path", "PathGroup",
    "PotentialList", "PotentialLoad", "Prompt", "Query", "RankLoad", "RankPlace", "RegionPrefix", "SelectRequest", "Selection",
    "Session", "SessionBinding", "SessionHolding", "SessionList", "Status", "Target", "TierCounts", "WorkerInfo",
    "WorkerList", "WorkerLoad", "WorkerRecord", "errors",
]
