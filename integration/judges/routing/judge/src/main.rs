//! Reads calls, one JSON object a line, from standard input; has NVIDIA Dynamo's worker selector answer each; writes
//! what it did, one JSON object a line. The selector returns no costs, but logs that of the worker it has chosen: so it
//! is asked at a temperature at which it chooses everybody, until it has.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;
use std::io::{BufRead, Write};

use dynamo_kv_router::config::{KvRouterConfig, RouterConfigOverride};
use dynamo_kv_router::indexer::{LowerTierMatchDetails, MatchDetails, TieredMatchDetails};
use dynamo_kv_router::protocols::{
    OverlapScores, RoutingConstraints, SharedCacheHits, StorageTier, WorkerId, WorkerSelectionResult, WorkerWithDpRank,
};
use dynamo_kv_router::scheduling::{OverlapAnalysis, OverlapSignals, ScheduleMode};
use dynamo_kv_router::test_utils::SimpleWorkerConfig;
use dynamo_kv_router::{
    DefaultWorkerSelector, KvSchedulerError, SchedulingRequest, WorkerLoadProjection, WorkerSelectionInput, WorkerSelector,
};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Call {
    config: KvRouterConfig,
    worker_type: String,
    block_size: u32,
    isl: usize,
    token_seq: Option<u64>,
    overrides: Option<RouterConfigOverride>,
    workers: Vec<Worker>,
    rows: Vec<Row>,
    untiered: bool,
    shared: Option<Vec<(u32, u32)>>,
    pinned: Option<(WorkerId, u32)>,
    allowed: Option<HashSet<WorkerId>>,
    overloaded: Option<HashSet<WorkerId>>,
    constraints: RoutingConstraints,
    eligible: usize,
    draws: usize,
    seed: u64,
}

#[derive(Deserialize)]
struct Worker {
    id: WorkerId,
    ranks: u32,
    taints: HashSet<String>,
}

#[derive(Deserialize)]
struct Row {
    worker: WorkerId,
    rank: u32,
    device: u32,
    host: usize,
    disk: usize,
    external: usize,
    overlap: f64,
    load: Option<Load>,
}

#[derive(Deserialize)]
struct Load {
    prefill: usize,
    blocks: usize,
    requests: usize,
    new: usize,
}

#[derive(Serialize, Default)]
struct Answer {
    error: String,
    candidates: Vec<Candidate>,
}

#[derive(Serialize)]
struct Candidate {
    worker: WorkerId,
    rank: u32,
    cost: f64,
    rounded: bool, // the cost, to three digits
    required_blocks: u64,
    effective_overlap: f64,
    cached_tokens: usize,
    potential_decode_blocks: usize,
    picked: usize,
}

fn main() {
    tracing::subscriber::set_global_default(Listener).expect("the only subscriber");
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line of text");
        let answer = match serde_json::from_str::<Call>(&line) {
            Ok(call) => answer(call),
            Err(error) => Answer { error: format!("not a call: {error}"), ..Default::default() },
        };
        serde_json::to_writer(&mut out, &answer).expect("an answer is JSON");
        out.write_all(b"\n").and_then(|_| out.flush()).expect("somebody reads");
    }
}

fn answer(call: Call) -> Answer {
    let worker_type: &'static str = if call.worker_type == "decode" { "decode" } else { "prefill" };
    let selector = DefaultWorkerSelector::new_seeded(Some(call.config.clone()), worker_type, call.seed);
    let workers: HashMap<WorkerId, SimpleWorkerConfig> = call
        .workers
        .iter()
        .map(|w| {
            let config = SimpleWorkerConfig { data_parallel_size: w.ranks, taints: w.taints.clone(), ..Default::default() };
            (w.id, config)
        })
        .collect();
    let mut request = request(&call);

    let mut seen: BTreeMap<(WorkerId, u32), Candidate> = BTreeMap::new();
    let temperature = request.router_config_override.clone();
    request.router_config_override.get_or_insert_default().router_temperature = Some(1e9);
    for _ in 0..10_000 {
        match choose(&selector, &workers, &request, &call) {
            Ok(result) => {
                let (cost, rounded) = LOGGED.take();
                seen.entry((result.worker.worker_id, result.worker.dp_rank)).or_insert(Candidate {
                    worker: result.worker.worker_id,
                    rank: result.worker.dp_rank,
                    cost,
                    rounded,
                    required_blocks: result.required_blocks,
                    effective_overlap: result.effective_overlap_blocks,
                    cached_tokens: result.cached_tokens,
                    potential_decode_blocks: result.potential_decode_blocks,
                    picked: 0,
                });
            }
            Err(error) => return Answer { error: format!("{error:?}"), ..Default::default() },
        }
        if seen.len() >= call.eligible {
            break;
        }
    }
    request.router_config_override = temperature;
    for _ in 0..call.draws {
        match choose(&selector, &workers, &request, &call) {
            Ok(result) => match seen.get_mut(&(result.worker.worker_id, result.worker.dp_rank)) {
                Some(candidate) => candidate.picked += 1,
                None => return Answer { error: "chose one not seen before".into(), ..Default::default() },
            },
            Err(error) => return Answer { error: format!("{error:?}"), ..Default::default() },
        }
    }
    Answer { candidates: seen.into_values().collect(), ..Default::default() }
}

fn choose(
    selector: &DefaultWorkerSelector,
    workers: &HashMap<WorkerId, SimpleWorkerConfig>,
    request: &SchedulingRequest,
    call: &Call,
) -> Result<WorkerSelectionResult, KvSchedulerError> {
    let eligibility = request.eligibility_with_overloaded(call.overloaded.as_ref());
    selector.select_worker(WorkerSelectionInput::configured(workers, request, eligibility, call.block_size))
}

fn request(call: &Call) -> SchedulingRequest {
    let rank = |row: &Row| WorkerWithDpRank::new(row.worker, row.rank);
    let overlap = if call.untiered {
        let mut signals = OverlapSignals::default();
        for row in &call.rows {
            signals.effective_overlap_blocks.insert(rank(row), row.overlap);
            let tokens = (row.overlap * call.block_size as f64).round() as usize;
            signals.effective_cached_tokens.insert(rank(row), tokens);
        }
        signals
    } else {
        let mut device = OverlapScores::new();
        let (mut host, mut disk, mut external) =
            (LowerTierMatchDetails::default(), LowerTierMatchDetails::default(), LowerTierMatchDetails::default());
        for row in &call.rows {
            device.scores.insert(rank(row), row.device);
            host.hits.insert(rank(row), row.host);
            disk.hits.insert(rank(row), row.disk);
            external.hits.insert(rank(row), row.external);
        }
        let tiered = TieredMatchDetails {
            device: MatchDetails { overlap_scores: device, ..Default::default() },
            lower_tier: HashMap::from([(StorageTier::HostPinned, host), (StorageTier::Disk, disk), (StorageTier::External, external)]),
        };
        OverlapAnalysis::new(&call.config, call.block_size, &tiered).signals()
    };
    let loads = call.rows.iter().filter_map(|row| {
        let load = row.load.as_ref()?;
        let projection = WorkerLoadProjection {
            active_prefill_tokens: load.prefill,
            active_decode_blocks: load.blocks,
            active_requests: load.requests,
            additional_active_blocks: load.new,
        };
        Some((rank(row), projection))
    });
    SchedulingRequest {
        mode: ScheduleMode::QueryOnly { request_id: None },
        token_seq: call.token_seq.map(|n| (0..n).collect()),
        isl_tokens: call.isl,
        overlap,
        kv_transfer_candidates: None,
        retain_kv_transfer_chain: false,
        worker_loads: loads.collect(),
        track_prefill_tokens: call.config.track_prefill_tokens(call.overrides.as_ref()),
        router_config_override: call.overrides.clone(),
        lora_name: None,
        priority_jump: 0.0,
        strict_priority: 0,
        policy_class: None,
        session_context: None,
        expected_output_tokens: None,
        affinity_target: None,
        pinned_worker: call.pinned.map(|(worker, rank)| WorkerWithDpRank::new(worker, rank)),
        allowed_worker_ids: call.allowed.clone(),
        routing_constraints: call.constraints.clone(),
        shared_cache_hits: call
            .shared
            .as_ref()
            .map(|ranges| SharedCacheHits::from_ranges(ranges.iter().map(|&(from, to)| from..to).collect())),
        resp_tx: None,
    }
}

thread_local! {
    static LOGGED: RefCell<(f64, bool)> = const { RefCell::new((f64::NAN, false)) };
}

/// Listens to what the selector logs of each choice.
struct Listener;

impl tracing::Subscriber for Listener {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::INFO && metadata.target().contains("selector")
    }
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut Fields);
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

struct Fields;

impl tracing::field::Visit for Fields {
    fn record_f64(&mut self, field: &tracing::field::Field, value: f64) {
        if field.name() == "logit" {
            LOGGED.set((value, false));
        }
    }
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        if field.name() == "message" {
            let text = format!("{value:?}");
            if let Some((_, rest)) = text.split_once("logit: ") {
                let number = rest.split(',').next().and_then(|n| n.parse().ok());
                LOGGED.set((number.unwrap_or(f64::NAN), true)); // of a pinned worker
            }
        }
    }
}
