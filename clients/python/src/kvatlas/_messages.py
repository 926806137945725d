"""What is asked and answered, by the names that it has in JSON. The fields: docs/api.md, docs/routing-reference.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any, Literal

# ---- requests


@dataclass(frozen=True)
class PartitionSeq:
    """A place in a partition's log."""

    partition: int
    seq: int


@dataclass(frozen=True)
class RankPlace:
    """One rank of a worker."""

    instance: str
    rank: int = 0


@dataclass(frozen=True)
class Target:
    """A worker, or one rank of it."""

    worker: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Settings of the choice for one request."""

    overlap_score_credit: float | None = None
    prefill_load_scale: float | None = None
    router_temperature: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = None


@dataclass(frozen=True)
class MediaItem:
    """An image or the like in a prompt: the identifier that the engine gives it, or what `hashing.media_hash` makes of
    that, and the tokens that stand for it."""

    hash: str | int
    offset: int
    length: int


@dataclass(frozen=True)
class _Prompted:
    model: str
    _: KW_ONLY
    block_size: int | None = None
    """Tokens of a block: an error if the model's workers have others; None: any will do."""
    tokens: Iterable[int] | None = None
    """Token ids of the whole prompt: a list, a tuple, or an array."""
    hashes: Iterable[int] | None = None
    """In place of tokens: the local hashes of the prompt's blocks, as `kvatlas.hashing` computes them."""
    lora_name: str | None = None
    cache_salt: str | None = None
    media: Iterable[MediaItem] | None = None
    """The images in tokens, in order."""


@dataclass(frozen=True, kw_only=True)
class Query(_Prompted):
    """Who holds how much of a prompt?"""

    engine_hashes: Iterable[int] | None = None
    """In place of tokens: the engine's own hashes of the prompt's blocks, from the first block on."""
    prompt: str | None = None
    """The prompt as text, in place of tokens, if the indexer makes tokens of it (docs/text.md)."""
    messages: Iterable[Mapping[str, Any]] | None = None
    """Messages of a chat, in place of tokens. What follows goes with them."""
    tools: Iterable[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    request: Mapping[str, Any] | None = None
    """Fields of a request to an engine, in place of the prompt, or beside it: the indexer finds their effect."""
    api: Literal["completions", "chat", "responses", "messages", "embeddings", "score", "rerank"] | None = None
    """The API of request; None: its fields decide."""
    return_token_ids: bool = False
    """Answer with the tokens of a text too."""
    workers: Iterable[str] | None = None
    """Look at these workers only."""
    ranks: Iterable[RankPlace] | None = None
    """In place of workers: look at these ranks only."""
    endpoints: Iterable[str] | None = None
    """In place of workers: look at the ranks only that are registered with these serving addresses."""
    with_endpoint: bool = False
    """Say each rank's serving address."""
    by_endpoint: bool = False
    """Answer by serving address."""
    within: Iterable[str] | None = None
    """Say also how much each rank has within these tiers alone: "device", "device+host" ..."""
    with_engine_hashes: bool = False
    """Add the engine's hashes of the leading blocks; with one element in workers or ranks."""
    min_seq: Iterable[PartitionSeq] | None = None
    """Wait until the index reflects these places in the log."""
    deadline_ms: int | None = None
    """Longest wait for other nodes, in milliseconds; None: the timeout of the call. Partitions without an answer are
    in missing."""
    explain: bool = False
    idle: bool = False
    """Add ranks of the model that hold no block of the prompt."""
    diagnostic: bool = False
    """The query is of a person or a tool, not of a router: the funnel leaves it out."""
    l3: Literal["all", "beyond", "off"] | None = None
    """What to ask the shared store for; None: for what decides what workers would load."""
    l3_timeout_ms: int | None = None
    regions: bool = False
    """Add the longest prefix in each region; the nodes need --region."""


@dataclass(frozen=True, kw_only=True)
class Prompt(_Prompted):
    """A prompt whose load is counted."""

    sequence_hashes: Iterable[int] | None = None
    """The blocks that requests share, one for each whole block; None: they follow from tokens or hashes."""
    isl_tokens: int | None = None
    """Length of the prompt in tokens; None: of tokens, or of the hashes' whole blocks."""


@dataclass(frozen=True, kw_only=True)
class SelectRequest(Prompt):
    """Which worker should serve a prompt?"""

    engine_hashes: Iterable[int] | None = None
    """In place of tokens: the engine's own hashes of the prompt's blocks, from the first block on."""
    prompt: str | None = None
    """The prompt as text, in place of tokens, if the indexer makes tokens of it (docs/text.md)."""
    messages: Iterable[Mapping[str, Any]] | None = None
    """Messages of a chat, in place of tokens. What follows goes with them."""
    tools: Iterable[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    request: Mapping[str, Any] | None = None
    """Fields of a request to an engine, in place of the prompt, or beside it: the indexer finds their effect."""
    api: Literal["completions", "chat", "responses", "messages", "embeddings", "score", "rerank"] | None = None
    """The API of request; None: its fields decide."""
    return_token_ids: bool = False
    """Answer with the tokens of a text too."""
    request_id: str | None = None
    """Names the request in what follows."""
    book: bool = False
    """Book the request on the worker that is chosen. Without it, the choice is kept a while for `book` by the id."""
    workers: Iterable[str] | None = None
    """Only these may be chosen."""
    endpoints: Iterable[str] | None = None
    """In place of workers: only those with these serving addresses may be chosen."""
    excluded_workers: Iterable[str] | None = None
    """These must not be chosen, such as those at which an earlier try of the request failed."""
    policy: str | None = None
    role: Literal["aggregated", "prefill", "decode"] | None = None
    disaggregated: bool = False
    prefill_optional: bool = False
    advisory: bool = False
    """Say what would be chosen: nothing is booked or kept, and nothing waits."""
    session_id: str | None = None
    strict_priority: int | None = None
    priority_jump: float | None = None
    policy_class: str | None = None
    pinned_worker: Target | None = None
    affinity_target: Target | None = None
    required_taints: Iterable[str] | None = None
    preferred_taints: Mapping[str, float] | None = None
    expected_output_tokens: int | None = None
    router_config_override: Overrides | None = None
    min_seq: Iterable[PartitionSeq] | None = None
    deadline_ms: int | None = None
    """Longest lookup in the index, in milliseconds; None: the timeout of the call. Workers of a partition without an
    answer count as empty."""
    explain: bool = False
    diagnostic: bool = False
    """The request is of a person or a tool, not of a router: the funnel leaves it out."""
    l3: Literal["all", "beyond", "off"] | None = None
    """What to ask the shared store for; None: for what decides what workers would load."""
    l3_timeout_ms: int | None = None
    regions: bool = False
    """Add the longest prefix in each region; the nodes need --region."""


@dataclass(frozen=True, kw_only=True)
class BookRequest(Prompt):
    """Book a request on a worker: on the one that `select` chose for the id, if it names none."""

    request_id: str
    worker: str | None = None
    rank: int | None = None
    effective_prefill_tokens: int | None = None
    track_prefill_tokens: bool | None = None
    assume_kv_reuse: bool | None = None
    expected_output_tokens: int | None = None
    session_id: str | None = None


# ---- answers


@dataclass(frozen=True)
class HeldRun:
    """A run of blocks that a rank holds in the same tiers: from `start` up to, not including, `end`."""

    start: int = field(metadata={"wire": "from"})
    end: int = field(metadata={"wire": "to"})
    tiers: tuple[str, ...]


@dataclass(frozen=True)
class PathGroup:
    """A KV-cache group of a hybrid model."""

    index: int
    kind: str
    window: int = 0


@dataclass(frozen=True)
class Path:
    """A rank's way along a prompt."""

    stop: str
    held: tuple[HeldRun, ...] = ()
    more: bool = False
    group: PathGroup | None = None
    behind: int = 0
    l3_behind: int = 0


@dataclass(frozen=True)
class Overlap:
    """What one rank holds of a prompt, in blocks. The depths follow each other."""

    instance: str
    rank: int
    device: int
    host: int
    disk: int
    external: int
    l3: int = 0
    l3_stop: str = ""
    path: Path | None = None
    bound: str = ""
    engine: str = ""
    catching_up: bool = False
    guessed: int = 0
    endpoint: str = ""
    within: tuple[int, ...] = ()
    """Blocks within each of the query's sets of tiers; empty where that is nothing."""
    engine_hashes: tuple[int, ...] = ()
    """The engine's hashes of the leading blocks, if the query has with_engine_hashes."""

    @property
    def total(self) -> int:
        """Length of the prefix that lies in any of the rank's own tiers."""
        return self.device + self.host + self.disk + self.external


@dataclass(frozen=True)
class PartitionStatus:
    """The place in a partition's log that an answer reflects."""

    partition: int
    epoch: datetime
    seq: int
    stale_ms: int = 0
    resync_needed: bool = False


@dataclass(frozen=True)
class BrokenBlock:
    """A block of which a store has some objects and lacks others."""

    block: int
    objects: int
    of: int


@dataclass(frozen=True)
class L3:
    """What the shared store holds of a prompt."""

    status: str
    reason: str = ""
    ranges: tuple[tuple[int, ...], ...] = ()
    total: int = 0
    age_ms: float = 0.0
    unknown: tuple[tuple[int, ...], ...] = ()
    broken: tuple[BrokenBlock, ...] = ()
    from_start: int = 0


@dataclass(frozen=True)
class RegionPrefix:
    """The longest prefix of a prompt that a worker of a region holds. docs/regions.md explains the fields."""

    region: str
    state: str
    """complete, partial (the prefix may be longer) or unknown"""
    blocks: int
    tokens: int
    age_ms: int
    digest_blocks: int
    held_blocks: int
    false_positive_rate: float
    """Upper bound of the probability that blocks is too large."""
    local: bool = False
    reason: str = ""
    price_ms: float | None = None


@dataclass(frozen=True)
class Answer:
    """Who holds how much of a prompt."""

    model: str
    block_size: int
    blocks: int
    complete: bool
    workers: tuple[Overlap, ...]
    """Best first."""
    partitions: tuple[PartitionStatus, ...]
    l3: L3
    missing: tuple[int, ...] = ()
    reason: str = ""
    by_endpoint: Mapping[str, tuple[Overlap, ...]] | None = None
    """In place of workers, if the query asks for it."""
    unknown_endpoints: tuple[str, ...] = ()
    """Those of the query that no rank of the model is registered with."""
    regions: tuple[RegionPrefix, ...] = ()
    tokenized: bool | None = None
    """Of a text: whether tokens could be made of it. If not, this is the answer without."""
    tokenize_error: str = ""
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    unsupported_fields: tuple[str, ...] = ()
    """The fields of the request that prevented a look-up."""


@dataclass(frozen=True)
class Disaggregation:
    """Why a request has a prefill worker, or none."""

    outcome: str
    bypass: bool
    reason: str
    net_new_tokens: int


@dataclass(frozen=True)
class WorkerLoad:
    """What a rank has to do, and has room for."""

    active_prefill_tokens: int
    prefill_token_capacity: int
    total_kv_blocks: int = 0
    prefill_busy: bool | None = None


@dataclass(frozen=True)
class SessionBinding:
    """What became of the binding of a session to a worker."""

    id: str
    binding: str
    moved_from: Target | None = field(default=None, metadata={"wire": "from"})


@dataclass(frozen=True)
class KVSource:
    """A rank that can send further blocks of the prompt to the chosen one."""

    worker: str
    rank: int
    endpoint: str
    blocks: int
    tokens: int


@dataclass(frozen=True)
class Selection:
    """The worker that should serve a prompt. Depths are in blocks."""

    model: str
    block_size: int
    blocks: int
    isl_tokens: int
    booked: bool
    worker: str
    rank: int
    device: int
    host: int
    disk: int
    external: int
    l3: int
    policy: str
    candidates: int
    cost: float
    probability: float
    required_blocks: int
    effective_overlap: float
    cached_tokens: int
    effective_prefill_tokens: int
    track_prefill_tokens: bool
    potential_decode_blocks: int
    complete: bool
    missing: tuple[int, ...] = ()
    request_id: str = ""
    endpoint: str = ""
    guessed: int = 0
    explanation: Mapping[str, Any] | None = None
    decode_busy: bool | None = None
    worker_load: WorkerLoad | None = None
    prefill: Selection | None = None
    disaggregation: Disaggregation | None = None
    session: SessionBinding | None = None
    kv_source: KVSource | None = None
    unknown_endpoints: tuple[str, ...] = ()
    regions: tuple[RegionPrefix, ...] = ()
    tokenized: bool | None = None
    """Of a text: whether tokens could be made of it. If not, this is the answer without."""
    tokenize_error: str = ""
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] | None = None
    unsupported_fields: tuple[str, ...] = ()
    """The fields of the request that prevented a look-up."""


@dataclass(frozen=True)
class Booking:
    """Where a request is booked."""

    model: str
    request_id: str
    worker: str
    rank: int


@dataclass(frozen=True)
class RankLoad:
    """What one rank has to do."""

    worker: str
    rank: int
    active_prefill_tokens: int
    active_blocks: int
    active_requests: int


@dataclass(frozen=True)
class ModelLoads:
    """What the workers of one model have to do."""

    model: str
    requests: int
    ranks: tuple[RankLoad, ...]
    pending_count: int = 0
    pending_isl_tokens: int = 0


@dataclass(frozen=True)
class LoadList:
    """What workers have to do, by model."""

    models: tuple[ModelLoads, ...]


@dataclass(frozen=True)
class PotentialLoad:
    """What one rank would have to do."""

    worker: str
    rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


@dataclass(frozen=True)
class PotentialList:
    """What each worker would have to do with a prompt beside what it has."""

    model: str
    ranks: tuple[PotentialLoad, ...]
    pending_count: int = 0
    pending_isl_tokens: int = 0


@dataclass(frozen=True)
class Session:
    """A session that is bound to a rank."""

    model: str
    session_id: str
    """The name of a session without an id begins with `prompt:`."""
    worker: str
    rank: int
    last_use: datetime
    expires: datetime


@dataclass(frozen=True)
class SessionHolding:
    """The blocks of a session on a rank: the block that the engine stored last for the session, and all before it."""

    model: str
    worker: str
    rank: int
    blocks: int
    """Held or not."""
    device: int
    host: int
    disk: int
    external: int


@dataclass(frozen=True)
class SessionList:
    """Sessions, the last used first."""

    sessions: tuple[Session, ...]
    total: int
    """Sessions without the limit."""
    affinity: bool
    """False: the nodes run without session_affinity."""
    held: tuple[SessionHolding, ...] = ()
    """Of a request with a session_id: the blocks of the session on each rank."""
    missing: tuple[int, ...] = ()
    """Partitions without an answer."""
    unknown_ranks: int = 0
    """Further ranks that may have older blocks of the session."""


@dataclass(frozen=True)
class TierCounts:
    """A number of blocks for each tier."""

    device: int
    host: int
    disk: int
    external: int


@dataclass(frozen=True)
class Lease:
    """A shim's hold on a rank."""

    holder: str
    host: str
    pid: int
    since: datetime
    state: str
    renewed: datetime
    expires: datetime
    l3: str = ""
    stopped: datetime | None = None


@dataclass(frozen=True)
class WorkerRecord:
    """What is registered of a rank, and whether it may be chosen."""

    state: str
    reasons: tuple[str, ...] = ()
    endpoint: str = ""
    role: str = ""
    bootstrap_port: int = 0
    rank_start: int = 0
    rank_size: int = 0
    total_kv_blocks: int = 0
    max_num_batched_tokens: int = 0
    stable_routing_id: str = ""
    taints: tuple[str, ...] = ()
    topology_domains: Mapping[str, str] = field(default_factory=dict)
    lora_adapters: tuple[str, ...] | None = None
    served_model_names: tuple[str, ...] | None = None
    events: str = ""


@dataclass(frozen=True)
class WorkerInfo:
    """What the log knows of one rank."""

    instance: str
    rank: int
    model: str
    block_size: int
    partition: int
    incarnation: int
    last_event: int
    last_seen: datetime
    blocks: TierCounts
    pending: int
    copies: int
    stored: int
    removed: int
    cleared: int = 0
    lookahead: int = 0
    lease: Lease | None = None
    engine: str = ""
    engine_since: datetime | None = None
    engine_why: str = ""
    catching_up: bool = False
    record: WorkerRecord | None = None


@dataclass(frozen=True)
class WorkerList:
    """All ranks that the log knows."""

    workers: tuple[WorkerInfo, ...]
    complete: bool
    missing: tuple[int, ...] = ()
    next: RankPlace | None = None


@dataclass(frozen=True)
class ModelStatus:
    """A model that some rank serves."""

    model: str
    block_size: int
    ranks: int


@dataclass(frozen=True)
class PartitionDetail:
    """How a node stands with one partition."""

    partition: int
    epoch: datetime
    seq: int
    state: str
    log_last: int
    lag: int
    ranks: int
    stale_ms: int = 0
    resync_needed: bool = False
    snapshot_seq: int = 0
    behind: bool = False


@dataclass(frozen=True)
class IndexStatus:
    """The size of a node's index."""

    blocks: TierCounts
    distinct: int
    bytes: int
    blocks_applied: int = 0
    decoder_bytes: int = 0


@dataclass(frozen=True)
class NodeStatus:
    """What a node announces of itself."""

    node: str
    build: str
    ready: tuple[int, ...]
    behind: tuple[int, ...] = ()
    releasing: tuple[int, ...] = ()
    answers: bool = False
    leaving: bool = False
    zone: str = ""


@dataclass(frozen=True)
class ClusterStatus:
    """What a node knows of the nodes that share its namespace."""

    copies: int
    nodes: tuple[NodeStatus, ...]
    short: tuple[int, ...] = ()
    unserved: tuple[int, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """How a node is doing."""

    node: str
    version: str
    namespace: str
    ready: bool
    since: datetime
    models: tuple[ModelStatus, ...]
    partitions: tuple[PartitionDetail, ...]
    index: IndexStatus
    problems: tuple[str, ...]
    events: Mapping[str, int] = field(default_factory=dict)
    cluster: ClusterStatus | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All that the node said, these fields too, as it stands in JSON."""
