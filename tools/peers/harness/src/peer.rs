//! The peers, each used as its authors mean it to be.

use std::cell::RefCell;
use std::sync::Arc;

use dynamo_kv_router::indexer::{KvIndexerInterface, SyncIndexer};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash,
    OverlapScores, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree, ThreadPoolIndexer};
use kv_index::{ChainBlockMap, ChainIndex, SequenceHash};

use crate::corpus::{Corpus, Op};

/// An index under measurement. What its interface takes by value (events, prompts) is made before the clock starts.
pub trait Peer: Sized {
    /// A store or a removal.
    type Event: Send;
    /// What one writing thread needs beside the index.
    type Writer: Send;
    /// A prompt's local hashes; cloned before the clock starts.
    type Prompt: Clone + Send + Sync;
    type Answer: Default;

    /// An index, and for each thread that brings it events a writer. A worker's events all go to writer `worker % writers`.
    fn new(corpus: &Corpus, writers: usize) -> (Self, Vec<Self::Writer>);
    fn event(worker: u32, op: &'static Op) -> Self::Event;
    fn prompt(locals: &'static [u64]) -> Self::Prompt;
    fn apply(&self, writer: &mut Self::Writer, event: Self::Event);
    /// Waits until all that was applied can be seen.
    fn settle(&self) {}
    fn query(&self, prompt: Self::Prompt, answer: &mut Self::Answer);
    /// Calls f with every worker and the number of leading blocks that it holds.
    fn each(answer: &Self::Answer, f: impl FnMut(u32, u32));
}

/// SMG: smg-project/smg, crates/kv_index. Content hashes and the engine's own hashes go in as they are; no
/// sequence hash is computed. A lane owns workers and keeps a map of names for each, as the crate's replay benchmark does.
pub struct Chain {
    index: ChainIndex,
    ids: Vec<u32>,     // of our worker numbers
    workers: Vec<u32>, // of its ids
}

impl Peer for Chain {
    type Event = (u32, &'static Op);
    type Writer = Vec<ChainBlockMap>;
    type Prompt = &'static [u64];
    type Answer = Vec<(u32, u32)>;

    fn new(corpus: &Corpus, writers: usize) -> (Self, Vec<Self::Writer>) {
        let index = ChainIndex::with_max_workers(corpus.workers as usize);
        let ids: Vec<u32> = (0..corpus.workers)
            .map(|w| index.intern_worker(&format!("worker-{w}")).expect("at most 1,024 workers, as main has checked"))
            .collect();
        let mut workers = vec![0; ids.iter().max().map_or(0, |m| *m as usize + 1)];
        for (worker, id) in ids.iter().enumerate() {
            workers[*id as usize] = worker as u32;
        }
        let lane = || (0..corpus.workers).map(|_| ChainBlockMap::new()).collect();
        (Chain { index, ids, workers }, (0..writers).map(|_| lane()).collect())
    }

    fn event(worker: u32, op: &'static Op) -> Self::Event {
        (worker, op)
    }

    fn prompt(locals: &'static [u64]) -> Self::Prompt {
        locals
    }

    fn apply(&self, maps: &mut Self::Writer, (worker, op): Self::Event) {
        let (id, map) = (self.ids[worker as usize], &mut maps[worker as usize]);
        match op {
            // An error is a store whose parent it does not know: dropped, which the digest shows.
            Op::Store { parent, blocks, .. } => {
                let _ = self.index.apply_stored(id, blocks, parent.map(SequenceHash), map);
            }
            Op::Remove { names, .. } => self.index.apply_removed(id, names, map),
            Op::Query { .. } => {}
        }
    }

    fn query(&self, prompt: Self::Prompt, answer: &mut Self::Answer) {
        answer.clear();
        self.index.score_into(prompt, |local| *local, false, |id, depth| answer.push((self.workers[id as usize], depth)));
    }

    fn each(answer: &Self::Answer, mut f: impl FnMut(u32, u32)) {
        answer.iter().for_each(|(worker, depth)| f(*worker, *depth));
    }
}

fn router_event(worker: u32, op: &'static Op) -> RouterEvent {
    let data = match op {
        Op::Store { parent, blocks, .. } => KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: blocks
                .iter()
                .map(|b| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(b.seq_hash.0),
                    tokens_hash: LocalBlockHash(b.content_hash.0),
                    mm_extra_info: None,
                })
                .collect(),
        }),
        Op::Remove { names, .. } => {
            KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: names.iter().map(|n| ExternalSequenceBlockHash(n.0)).collect() })
        }
        Op::Query { .. } => unreachable!("a query is no event"),
    };
    RouterEvent::new(worker.into(), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

fn each_score(answer: &OverlapScores, mut f: impl FnMut(u32, u32)) {
    answer.scores.iter().for_each(|(worker, depth)| f(worker.worker_id as u32, *depth));
}

/// NVIDIA Dynamo's default: ai-dynamo/dynamo, lib/kv-router, a pool of threads that write a concurrent compressed radix
/// tree. One thread brings the events, as the router's subscriber does; queries run on the caller's thread.
pub struct Pool(ThreadPoolIndexer<ConcurrentRadixTreeCompressed>);

impl Peer for Pool {
    type Event = RouterEvent;
    type Writer = ();
    type Prompt = Arc<[LocalBlockHash]>;
    type Answer = OverlapScores;

    fn new(corpus: &Corpus, writers: usize) -> (Self, Vec<Self::Writer>) {
        (Pool(ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), writers, corpus.block_size)), vec![()])
    }

    fn event(worker: u32, op: &'static Op) -> Self::Event {
        router_event(worker, op)
    }

    fn prompt(locals: &'static [u64]) -> Self::Prompt {
        locals.iter().map(|l| LocalBlockHash(*l)).collect()
    }

    fn apply(&self, _: &mut Self::Writer, event: Self::Event) {
        self.0.enqueue_event(event).expect("the pool runs until it is dropped");
    }

    fn settle(&self) {
        pollster::block_on(self.0.flush_and_wait()).expect("the pool runs until it is dropped");
    }

    fn query(&self, prompt: Self::Prompt, answer: &mut Self::Answer) {
        *answer = self.0.backend().find_matches(&prompt, false);
    }

    fn each(answer: &Self::Answer, f: impl FnMut(u32, u32)) {
        each_score(answer, f);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.shutdown();
    }
}

/// NVIDIA Dynamo's radix tree for one thread. A query takes the prompt by value.
pub struct Radix(RefCell<RadixTree>);

impl Peer for Radix {
    type Event = RouterEvent;
    type Writer = ();
    type Prompt = Vec<LocalBlockHash>;
    type Answer = OverlapScores;

    fn new(_: &Corpus, _: usize) -> (Self, Vec<Self::Writer>) {
        (Radix(RefCell::new(RadixTree::new())), vec![()])
    }

    fn event(worker: u32, op: &'static Op) -> Self::Event {
        router_event(worker, op)
    }

    fn prompt(locals: &'static [u64]) -> Self::Prompt {
        locals.iter().map(|l| LocalBlockHash(*l)).collect()
    }

    fn apply(&self, _: &mut Self::Writer, event: Self::Event) {
        // An error is an event that it cannot place: dropped, which the digest shows.
        let _ = self.0.borrow_mut().apply_event(event);
    }

    fn query(&self, prompt: Self::Prompt, answer: &mut Self::Answer) {
        *answer = self.0.borrow().find_matches(prompt, false);
    }

    fn each(answer: &Self::Answer, f: impl FnMut(u32, u32)) {
        each_score(answer, f);
    }
}
