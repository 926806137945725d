"""Messages of requests and answers, with the names of the fields in JSON.

docs/api.md and docs/routing-reference.md explain all fields. Requests omit fields with None. Messages are immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any, Literal

# ---- requests


@dataclass(frozen=True)
class PartitionSeq:
    """PartitionSeq is a position in a partition's log."""

    partition: int
    seq: int


@dataclass(frozen=True)
class RankPlace:
    """RankPlace is a rank of a worker."""

    instance: str
    rank: int = 0


@dataclass(frozen=True)
class Target:
    """Target is a worker, or a rank of the worker. None in rank: any rank of the worker."""

    worker: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Overrides replace settings of the choice for a single request. None: the setting of the service."""

    overlap_score_credit: float | None = None
    prefill_load_scale: float | None = None
    router_temperature: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = None


@dataclass(frozen=True)
class MediaItem:
    """MediaItem is an image or another multimodal item in the tokens of a prompt."""

    hash: str | int
    """The engine's identifier of the item as text, or the `hashing.media_hash` of the identifier."""
    offset: int
    """Position of the first placeholder token, from 0."""
    length: int
    """Number of placeholder tokens."""


@dataclass(frozen=True)
class _Prompted:
    model: str
    _: KW_ONLY
    block_size: int | None = None
    """Expected size of a block in tokens. The request fails for another size; None: no comparison."""
    tokens: Iterable[int] | None = None
    """Token ids of the whole prompt: a list, a tuple, or an array."""
    hashes: Iterable[int] | None = None
    """Local hashes of the prompt's blocks from `kvatlas.hashing`, in place of tokens."""
    lora_name: str | None = None
    """Name of the LoRA adapter. The name and cache_salt change the hashes of tokens. Both are not valid with hashes."""
    cache_salt: str | None = None
    media: Iterable[MediaItem] | None = None
    """Images and other items in tokens, in the order of the offsets."""


@dataclass(frozen=True, kw_only=True)
class Query(_Prompted):
    """Query is a request for the workers that hold a prefix of a prompt, with their depths."""

    engine_hashes: Iterable[int] | None = None
    """The engine's own hashes of the prompt's blocks, from the first block on, in place of tokens."""
    prompt: str | None = None
    """The prompt as text, in place of tokens. The indexer needs a source of tokens (docs/text.md)."""
    messages: Iterable[Mapping[str, Any]] | None = None
    """Messages of a chat, in place of tokens. The next five fields are valid with messages only."""
    tools: Iterable[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    request: Mapping[str, Any] | None = None
    """Fields of a request to an engine, in place of a prompt or beside it. Each field has its effect in the engine."""
    api: Literal["completions", "chat", "responses", "messages", "embeddings", "score", "rerank"] | None = None
    """The engine's API of request; None: the fields of request determine the API."""
    return_token_ids: bool = False
    """Adds the tokens of a text to the answer."""
    workers: Iterable[str] | None = None
    """Restricts the answer to these workers."""
    ranks: Iterable[RankPlace] | None = None
    """Restricts the answer to these ranks, in place of workers."""
    endpoints: Iterable[str] | None = None
    """Restricts the answer to ranks with these registered serving addresses, in place of workers and ranks."""
    with_endpoint: bool = False
    """Adds the serving address of each rank, as endpoints does."""
    by_endpoint: bool = False
    """Groups the answer by serving address."""
    within: Iterable[str] | None = None
    """Adds the depths within these sets of tiers alone, such as "device" and "device+host"."""
    with_engine_hashes: bool = False
    """Adds the engine's hashes of the leading blocks, with tokens or hashes, and one element in workers or ranks."""
    min_seq: Iterable[PartitionSeq] | None = None
    """Positions in the log that the answer must reflect. The node waits for the positions until the deadline."""
    deadline_ms: int | None = None
    """Longest time of the query in milliseconds, with all waits; None: the timeout of the call. missing then lists the
    partitions without an answer."""
    explain: bool = False
    """Adds the path of each rank along the prompt, and all ranks, as idle does. Explanations are expensive."""
    idle: bool = False
    """Adds ranks of the model that hold no block of the prompt."""
    diagnostic: bool = False
    """Marks a query of a person or a tool instead of a router. The funnel excludes diagnostic queries."""
    l3: Literal["all", "beyond", "off"] | None = None
    """The lookup in the shared store. "all": the whole prompt. "beyond": the blocks that no worker holds. "off": none.
    None: the blocks that workers would load."""
    l3_timeout_ms: int | None = None
    """Longest wait for the shared store in milliseconds; None: the setting of the node."""
    regions: bool = False
    """Adds the longest prefix in each region. The nodes need --region."""


@dataclass(frozen=True, kw_only=True)
class Prompt(_Prompted):
    """Prompt is a prompt with a counted load."""

    engine_hashes: Iterable[int] | None = None
    """The engine's own hashes of the prompt's blocks, from the first block on, in place of tokens."""
    sequence_hashes: Iterable[int] | None = None
    """Hashes of the blocks that requests share, one for each whole block; None: computed from tokens, hashes
    or engine_hashes."""
    isl_tokens: int | None = None
    """Length of the prompt in tokens; None: the length of tokens, or of the hashes' whole blocks."""


@dataclass(frozen=True, kw_only=True)
class SelectRequest(Prompt):
    """SelectRequest is a request to choose a worker for a prompt."""

    prompt: str | None = None
    """The prompt as text, in place of tokens. The indexer needs a source of tokens (docs/text.md)."""
    messages: Iterable[Mapping[str, Any]] | None = None
    """Messages of a chat, in place of tokens. The next five fields are valid with messages only."""
    tools: Iterable[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    request: Mapping[str, Any] | None = None
    """Fields of a request to an engine, in place of a prompt or beside it. Each field has its effect in the engine."""
    api: Literal["completions", "chat", "responses", "messages", "embeddings", "score", "rerank"] | None = None
    """The engine's API of request; None: the fields of request determine the API."""
    return_token_ids: bool = False
    """Adds the tokens of a text to the answer."""
    request_id: str | None = None
    """Id of the request in later operations, at most 1,024 bytes. A booking requires an id."""
    book: bool = False
    """Books the request on the chosen worker. False: the node keeps the choice for a while, for `book` with the id."""
    workers: Iterable[str] | None = None
    """The allowed workers; None: all workers of the model."""
    endpoints: Iterable[str] | None = None
    """The serving addresses of the allowed workers, in place of workers."""
    excluded_workers: Iterable[str] | None = None
    """Workers that must not be chosen, such as workers with a failed try of the request."""
    policy: str | None = None
    """Name of the policy; None: the setting of the service."""
    role: Literal["aggregated", "prefill", "decode"] | None = None
    """Role of the worker; None: aggregated and decode workers."""
    disaggregated: bool = False
    """Requests a decode worker and a prefill worker. pinned_worker and affinity_target apply to the decode worker."""
    prefill_optional: bool = False
    """Permits a single worker for a disaggregated request if the prefill or decode pool has no eligible worker."""
    advisory: bool = False
    """Requests a choice without effects: nothing is booked or kept, and the request does not wait."""
    session_id: str | None = None
    """Id of the request's session, which stays on a worker if the service has session affinity."""
    strict_priority: int | None = None
    """Priority of a waiting request in its class."""
    priority_jump: float | None = None
    """Seconds to add to the age of a waiting request."""
    policy_class: str | None = None
    """Class or family of classes of a waiting request."""
    pinned_worker: Target | None = None
    """The only worker for the request."""
    affinity_target: Target | None = None
    """The only worker for the request, if the worker may be chosen."""
    required_taints: Iterable[str] | None = None
    preferred_taints: Mapping[str, float] | None = None
    expected_output_tokens: int | None = None
    router_config_override: Overrides | None = None
    min_seq: Iterable[PartitionSeq] | None = None
    deadline_ms: int | None = None
    """Longest lookup in the index in milliseconds; None: the timeout of the call. Workers of a partition without an
    answer count as empty."""
    explain: bool = False
    """Adds the explanation of the choice."""
    diagnostic: bool = False
    """Marks a request of a person or a tool instead of a router. The funnel excludes diagnostic requests."""
    l3: Literal["all", "beyond", "off"] | None = None
    """The lookup in the shared store. "all": the whole prompt. "beyond": the blocks that no worker holds. "off": none.
    None: the blocks that workers would load."""
    l3_timeout_ms: int | None = None
    """Longest wait for the shared store in milliseconds; None: the setting of the node."""
    regions: bool = False
    """Adds the longest prefix in each region. The nodes need --region."""


@dataclass(frozen=True, kw_only=True)
class BookRequest(Prompt):
    """BookRequest books a request on a worker.

    Without a worker, it books the choice of `select` for the id. It must then have no prompt, rank or session.
    """

    request_id: str
    worker: str | None = None
    rank: int | None = None
    """Rank of the worker; None: rank 0."""
    effective_prefill_tokens: int | None = None
    """Number of tokens to prefill; None: 0."""
    track_prefill_tokens: bool | None = None
    """None: True."""
    assume_kv_reuse: bool | None = None
    """None: True."""
    expected_output_tokens: int | None = None
    session_id: str | None = None


# ---- answers


@dataclass(frozen=True)
class HeldRun:
    """HeldRun is a run of blocks in the same tiers of a rank: from start up to, not including, end."""

    start: int = field(metadata={"wire": "from"})
    end: int = field(metadata={"wire": "to"})
    tiers: tuple[str, ...]


@dataclass(frozen=True)
class PathGroup:
    """PathGroup is a KV-cache group of a hybrid model."""

    index: int
    kind: str
    """The name in vLLM: sliding_window, chunked_local_attention or mamba."""
    window: int = 0
    """The window, or the chunk, in tokens."""


@dataclass(frozen=True)
class Path:
    """Path is a rank's path along a prompt."""

    stop: str
    """The rule that ended the rank's own prefix, such as query_ends or not_held."""
    held: tuple[HeldRun, ...] = ()
    """Blocks of the prompt in any tier of the rank, in order."""
    more: bool = False
    """True: the list held is cut off."""
    group: PathGroup | None = None
    """The group that lacks blocks for a longer prefix, if stop is group_lacks_blocks."""
    behind: int = 0
    """Number of held blocks after the end of the prefix."""
    l3_behind: int = 0
    """Number of blocks in the shared store after the run to load."""


@dataclass(frozen=True)
class Overlap:
    """Overlap counts the blocks at the beginning of a prompt that a rank holds.

    device counts the blocks in device memory. host, disk and external each count the further blocks in the next tier.
    """

    instance: str
    rank: int
    device: int
    host: int
    disk: int
    external: int
    l3: int = 0
    """Further blocks, directly after the tiers, that the rank would load from the shared store."""
    l3_stop: str = ""
    """The reason for the end of the run in the shared store."""
    path: Path | None = None
    """Set for the best few hundred ranks if the query has explain."""
    bound: str = ""
    """Set if the depths, or l3, are an upper bound; empty: the numbers are exact."""
    engine: str = ""
    """State of the engine if the shim has no connection to the engine; empty: connected, or unknown."""
    catching_up: bool = False
    """True: the shim still publishes earlier events, so the depths are of an earlier time."""
    guessed: int = 0
    """A guess of the leading blocks in device memory, if greater than device."""
    endpoint: str = ""
    """Registered serving address, if the query has with_endpoint or endpoints."""
    within: tuple[int, ...] = ()
    """Usable leading blocks within each of the query's sets of tiers; empty: all numbers are 0."""
    engine_hashes: tuple[int, ...] = ()
    """The engine's hashes of the leading blocks, if the query has with_engine_hashes."""

    @property
    def total(self) -> int:
        """Returns the length in blocks of the prefix in all of the rank's own tiers."""
        return self.device + self.host + self.disk + self.external


@dataclass(frozen=True)
class PartitionStatus:
    """PartitionStatus is the position in a partition's log that an answer reflects."""

    partition: int
    epoch: datetime
    """Creation time of the partition's stream."""
    seq: int
    stale_ms: int = 0
    """Milliseconds since the last complete read of the log; 0: less than three seconds."""
    resync_needed: bool = False
    """True: the log has lost messages, and some workers have not published their blocks again yet."""


@dataclass(frozen=True)
class BrokenBlock:
    """BrokenBlock is a block with some objects in the shared store and some missing. Engines cannot load the block."""

    block: int
    objects: int
    """Number of stored objects."""
    of: int
    """Number of required objects."""


@dataclass(frozen=True)
class L3:
    """L3 has the blocks of a prompt in the shared store."""

    status: str
    """ok, partial, unavailable, not_configured or mismatch"""
    reason: str = ""
    """The reason for another status than ok, for people."""
    ranges: tuple[tuple[int, ...], ...] = ()
    """Stored blocks: pairs of the first block and the block after the last."""
    total: int = 0
    """Number of stored blocks."""
    age_ms: float = 0.0
    """Age of the oldest entry in milliseconds."""
    unknown: tuple[tuple[int, ...], ...] = ()
    """Blocks of unknown state, as in ranges."""
    broken: tuple[BrokenBlock, ...] = ()
    """Blocks with some missing objects, if the query has explain."""
    from_start: int = 0
    """Number of blocks that a rank without blocks of its own would load."""


@dataclass(frozen=True)
class RegionPrefix:
    """RegionPrefix is the longest prefix of a prompt on a worker of a region. docs/regions.md explains the fields."""

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
    """True: the region of the answering node, with exact figures."""
    reason: str = ""
    """The reason for another state than complete, for people."""
    price_ms: float | None = None
    """Configured price of a request in the region, in milliseconds; None: no price."""


@dataclass(frozen=True)
class Answer:
    """Answer has the depths of the workers for a query's prompt."""

    model: str
    block_size: int
    blocks: int
    """Number of whole blocks in the lookup."""
    complete: bool
    """False: workers of the missing partitions may be missing from the answer."""
    workers: tuple[Overlap, ...]
    """Ranks, best first."""
    partitions: tuple[PartitionStatus, ...]
    l3: L3
    missing: tuple[int, ...] = ()
    """Partitions without an answer."""
    reason: str = ""
    """The reason for an answer without a held block: no_whole_block, nothing_cached, not_tokenized or none_allowed."""
    by_endpoint: Mapping[str, tuple[Overlap, ...]] | None = None
    """Ranks by serving address, if the query has by_endpoint. workers then has only ranks without an address."""
    unknown_endpoints: tuple[str, ...] = ()
    """Addresses of the query without a registered rank of the model."""
    regions: tuple[RegionPrefix, ...] = ()
    tokenized: bool | None = None
    """False: the text could not be tokenized, and no block was looked up. None: the request has no text."""
    tokenize_error: str = ""
    """The reason if tokenized is False."""
    prompt_tokens: int = 0
    """Number of tokens of a text."""
    token_ids: tuple[int, ...] | None = None
    """Tokens of a text, if the request has return_token_ids."""
    unsupported_fields: tuple[str, ...] = ()
    """Fields of the request that prevented a lookup."""


@dataclass(frozen=True)
class Disaggregation:
    """Disaggregation has the reason for a request with or without a prefill worker."""

    outcome: str
    """prefill, short_prompt, prefill_busy, no_prefill_worker or no_decode_worker"""
    bypass: bool
    """True: the request has no prefill worker."""
    reason: str
    """The reason for people."""
    net_new_tokens: int
    """Number of tokens that the decode worker lacks."""


@dataclass(frozen=True)
class WorkerLoad:
    """WorkerLoad has the outstanding work and the capacity of a rank."""

    active_prefill_tokens: int
    prefill_token_capacity: int
    total_kv_blocks: int = 0
    """Capacity of the device memory in blocks; 0: unknown."""
    prefill_busy: bool | None = None
    """None: there is no threshold."""


@dataclass(frozen=True)
class SessionBinding:
    """SessionBinding is the effect of a request on the binding of the session."""

    id: str
    """Id of the session. The name of a session without an id begins with `prompt:`."""
    binding: str
    """made, kept, moved or none"""
    moved_from: Target | None = field(default=None, metadata={"wire": "from"})
    """Previous worker of a moved session; `from` in JSON."""


@dataclass(frozen=True)
class KVSource:
    """KVSource is a rank that can send further blocks of the prompt to the chosen rank."""

    worker: str
    rank: int
    endpoint: str
    """Serving address."""
    blocks: int
    """Leading blocks of the prompt that the source can send."""
    tokens: int
    """Tokens of the blocks after the prefix of the chosen rank."""


@dataclass(frozen=True)
class Selection:
    """Selection is the chosen worker for a prompt. Depths are in blocks, as in an `Overlap`.

    The fields of a disaggregated choice are of the decode worker, except prefill and disaggregation.
    """

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
    """Number of ranks before all filters."""
    cost: float
    probability: float
    required_blocks: int
    effective_overlap: float
    cached_tokens: int
    effective_prefill_tokens: int
    track_prefill_tokens: bool
    potential_decode_blocks: int
    complete: bool
    """False: workers of the missing partitions could not be searched, and count as empty."""
    missing: tuple[int, ...] = ()
    """Partitions without an answer."""
    request_id: str = ""
    endpoint: str = ""
    """Serving address of the worker; empty: the worker has registered no address."""
    guessed: int = 0
    explanation: Mapping[str, Any] | None = None
    """Set if the request has explain."""
    decode_busy: bool | None = None
    """True: the worker would be too busy to compute prompts as well. None: there is no threshold."""
    worker_load: WorkerLoad | None = None
    """Set for an advisory choice."""
    prefill: Selection | None = None
    """The choice of the prefill worker; None: the decode worker computes the prompt too."""
    disaggregation: Disaggregation | None = None
    """Set for a disaggregated choice."""
    session: SessionBinding | None = None
    """Set for a booked choice."""
    kv_source: KVSource | None = None
    """A rank that can send further blocks; None: there is no such rank, or the node runs without --kv-source-tokens."""
    unknown_endpoints: tuple[str, ...] = ()
    """Addresses of the request without a registered rank of the model."""
    regions: tuple[RegionPrefix, ...] = ()
    tokenized: bool | None = None
    """False: the text could not be tokenized, and no block was looked up. None: the request has no text."""
    tokenize_error: str = ""
    """The reason if tokenized is False."""
    prompt_tokens: int = 0
    """Number of tokens of a text."""
    token_ids: tuple[int, ...] | None = None
    """Tokens of a text, if the request has return_token_ids."""
    unsupported_fields: tuple[str, ...] = ()
    """Fields of the request that prevented a lookup."""


@dataclass(frozen=True)
class Booking:
    """Booking is the place of a booked request."""

    model: str
    request_id: str
    worker: str
    rank: int


@dataclass(frozen=True)
class RankLoad:
    """RankLoad is the outstanding work of a rank."""

    worker: str
    rank: int
    active_prefill_tokens: int
    active_blocks: int
    active_requests: int


@dataclass(frozen=True)
class ModelLoads:
    """ModelLoads has the outstanding work of a model's workers."""

    model: str
    requests: int
    """Number of requests under way."""
    ranks: tuple[RankLoad, ...]
    pending_count: int = 0
    """Number of requests in the queue of the answering node."""
    pending_isl_tokens: int = 0
    """Tokens of the prompts in the queue."""


@dataclass(frozen=True)
class LoadList:
    """LoadList has the outstanding work of workers, by model."""

    models: tuple[ModelLoads, ...]


@dataclass(frozen=True)
class PotentialLoad:
    """PotentialLoad is the outstanding work of a rank with a further prompt."""

    worker: str
    rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


@dataclass(frozen=True)
class PotentialList:
    """PotentialList has the outstanding work of each rank with a further prompt. The queue is as in `ModelLoads`."""

    model: str
    ranks: tuple[PotentialLoad, ...]
    pending_count: int = 0
    pending_isl_tokens: int = 0


@dataclass(frozen=True)
class Session:
    """Session is a session that is bound to a rank."""

    model: str
    session_id: str
    """The name of a session without an id begins with `prompt:`."""
    worker: str
    rank: int
    last_use: datetime
    """Time of the last request, or of the answer while a request runs."""
    expires: datetime
    """Time of the end of the session without a further use."""


@dataclass(frozen=True)
class SessionHolding:
    """SessionHolding has the blocks of a session on a rank: the last stored block, and all blocks before.

    A block in several tiers counts in each tier.
    """

    model: str
    worker: str
    rank: int
    blocks: int
    """Number of blocks, held or not."""
    device: int
    host: int
    disk: int
    external: int


@dataclass(frozen=True)
class SessionList:
    """SessionList is a list of sessions, the last used first."""

    sessions: tuple[Session, ...]
    total: int
    """Number of sessions without the limit."""
    affinity: bool
    """False: the nodes run without session_affinity."""
    held: tuple[SessionHolding, ...] = ()
    """Blocks of the session on each rank, if the request has a session_id and the engine's events have the session."""
    missing: tuple[int, ...] = ()
    """Partitions without an answer."""
    unknown_ranks: int = 0
    """Number of further ranks that may have older blocks of the session."""


@dataclass(frozen=True)
class TierCounts:
    """TierCounts has a number of blocks for each tier."""

    device: int
    host: int
    disk: int
    external: int


@dataclass(frozen=True)
class Lease:
    """Lease is a shim's lease of a rank."""

    holder: str
    """Name of a single run of the shim's process."""
    host: str
    pid: int
    since: datetime
    state: str
    """held, expired or ended"""
    renewed: datetime
    """Time by the clock of the NATS servers, as in expires."""
    expires: datetime
    l3: str = ""
    """Registered shared store of the rank, for people."""
    stopped: datetime | None = None
    """Time of an orderly stop of the shim while the engine ran on; None: not stopped."""


@dataclass(frozen=True)
class WorkerRecord:
    """WorkerRecord has the settings of a rank, and the state that decides on new requests (docs/worker-records.md)."""

    state: str
    """schedulable, draining, incomplete or unschedulable"""
    reasons: tuple[str, ...] = ()
    """Reasons for the state, for people."""
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
    """WorkerInfo has the state of a rank by the log."""

    instance: str
    rank: int
    model: str
    block_size: int
    partition: int
    incarnation: int
    last_event: int
    last_seen: datetime
    """Time of the last batch in the log."""
    blocks: TierCounts
    """Blocks held now."""
    pending: int
    """Number of blocks that wait for a parent."""
    copies: int
    """Copies of held blocks, beyond the first copy in a tier."""
    stored: int
    """Number of blocks in all stored events of the incarnation."""
    removed: int
    """Number of blocks in all removed events of the incarnation."""
    cleared: int = 0
    """Number of cleared events that the answering node has applied."""
    lookahead: int = 0
    """Number of tokens after a block in the block's local hash, for `hashing.block_hashes`."""
    lease: Lease | None = None
    """None: no shim has registered the rank."""
    engine: str = ""
    """State of the connection between the shim and the engine; empty: unknown."""
    engine_since: datetime | None = None
    engine_why: str = ""
    catching_up: bool = False
    """True: the shim still publishes earlier events."""
    record: WorkerRecord | None = None
    """None: the rank is not registered."""


@dataclass(frozen=True)
class WorkerList:
    """WorkerList has the ranks in the log."""

    workers: tuple[WorkerInfo, ...]
    """Ranks in the order of instance and rank."""
    complete: bool
    """False: ranks of the missing partitions may be missing from the list."""
    missing: tuple[int, ...] = ()
    """Partitions without an answer."""
    next: RankPlace | None = None
    """Place of the last rank in a page; None: the list is at the end, as in all lists of `Client.workers`."""


@dataclass(frozen=True)
class ModelStatus:
    """ModelStatus is a model with the number of its ranks."""

    model: str
    block_size: int
    ranks: int


@dataclass(frozen=True)
class PartitionDetail:
    """PartitionDetail is the state of a partition on a node."""

    partition: int
    epoch: datetime
    seq: int
    state: str
    """restoring, catching_up, serving, resync_needed or unavailable"""
    log_last: int
    """Last sequence of the log."""
    lag: int
    """Number of messages in the log that the node has not applied yet."""
    ranks: int
    stale_ms: int = 0
    resync_needed: bool = False
    snapshot_seq: int = 0
    behind: bool = False
    """True: the node is far behind the log, for longer than usual."""


@dataclass(frozen=True)
class IndexStatus:
    """IndexStatus is the size of a node's index."""

    blocks: TierCounts
    """Number of holdings. A block of three ranks has three holdings."""
    distinct: int
    """Number of different blocks."""
    bytes: int
    blocks_applied: int = 0
    """Number of blocks in stored events since the start of the node."""
    decoder_bytes: int = 0
    """Memory of the log's decoder, which is not in bytes."""


@dataclass(frozen=True)
class NodeStatus:
    """NodeStatus is a node's announcement. The tuples have partitions."""

    node: str
    build: str
    ready: tuple[int, ...]
    behind: tuple[int, ...] = ()
    """Served partitions, far behind the log."""
    releasing: tuple[int, ...] = ()
    """Served partitions that the node will release soon."""
    answers: bool = False
    """True: the node gave this status."""
    leaving: bool = False
    zone: str = ""


@dataclass(frozen=True)
class ClusterStatus:
    """ClusterStatus is a node's view of the nodes of the namespace."""

    copies: int
    """Intended number of nodes for each partition."""
    nodes: tuple[NodeStatus, ...]
    short: tuple[int, ...] = ()
    """Partitions with fewer ready nodes."""
    unserved: tuple[int, ...] = ()
    """Partitions without a node."""
    gone: tuple[str, ...] = ()
    """Nodes that are dead or cut off from NATS, for at most ten minutes."""


@dataclass(frozen=True)
class Status:
    """Status is the status of a node."""

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
    """Number of events by outcome since the start of the node."""
    cluster: ClusterStatus | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole reply of the node, decoded from JSON."""
