//! What is measured, for any peer. The definitions are those of `indexer bench index`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::corpus::{Corpus, Op, mix};
use crate::peer::Peer;

/// Figures that were measured; the rest stays None.
#[derive(Default)]
pub struct Report {
    pub blocks_per_s: Option<f64>,
    pub blocks_per_s_second: Option<f64>,
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
    pub p999_us: Option<f64>,
    pub p999_typical_us: Option<f64>,
    pub queries_per_s: Option<f64>,
    pub bytes_per_holding: Option<f64>,
    pub seconds: Option<f64>,
    pub digest: Option<u64>,
}

type Events<P> = Vec<Vec<<P as Peer>::Event>>; // by writer, in the corpus's order

fn worker_of(op: &Op) -> Option<u32> {
    match op {
        Op::Store { worker, .. } | Op::Remove { worker, .. } => Some(*worker),
        Op::Query { .. } => None,
    }
}

fn events<P: Peer>(ops: &'static [Op], writers: usize) -> Events<P> {
    let mut all: Events<P> = (0..writers).map(|_| Vec::new()).collect();
    for op in ops {
        if let Some(worker) = worker_of(op) {
            all[worker as usize % writers].push(P::event(worker, op));
        }
    }
    all
}

fn blocks(ops: &[Op]) -> usize {
    ops.iter()
        .map(|op| match op {
            Op::Store { blocks, .. } => blocks.len(),
            Op::Remove { names, .. } => names.len(),
            Op::Query { .. } => 0,
        })
        .sum()
}

/// Applies events on the calling thread, in the order of the corpus.
fn fill<P: Peer>(index: &P, writers: &mut [P::Writer], ops: &'static [Op]) {
    for (i, op) in ops.iter().enumerate() {
        if let Some(worker) = worker_of(op) {
            let to = worker as usize % writers.len();
            index.apply(&mut writers[to], P::event(worker, op));
        }
        if i % 1024 == 0 {
            index.settle(); // bounds what waits in queues
        }
    }
    index.settle();
}

/// events: stores and removes as fast as possible; the second pass is by a new index in the same process, after the first
/// one has given its memory back to the allocator.
pub fn events_one<P: Peer>(corpus: &'static Corpus) -> Report {
    let pass = || {
        let (index, mut writers) = P::new(corpus, 1);
        let mut all = events::<P>(&corpus.ops, 1);
        let start = Instant::now();
        for event in all.remove(0) {
            index.apply(&mut writers[0], event);
        }
        index.settle();
        corpus.blocks as f64 / start.elapsed().as_secs_f64()
    };
    Report { blocks_per_s: Some(pass()), blocks_per_s_second: Some(pass()), ..Report::default() }
}

/// events with several writers, each with its share of the workers.
pub fn events_many<P: Peer + Sync>(corpus: &'static Corpus, threads: usize) -> Report {
    let pass = || {
        let (index, mut writers) = P::new(corpus, threads);
        let all = events::<P>(&corpus.ops, writers.len());
        let start = Instant::now();
        std::thread::scope(|scope| {
            for (writer, events) in writers.iter_mut().zip(all) {
                let index = &index;
                scope.spawn(move || events.into_iter().for_each(|e| index.apply(writer, e)));
            }
        });
        index.settle();
        corpus.blocks as f64 / start.elapsed().as_secs_f64()
    };
    Report { blocks_per_s: Some(pass()), blocks_per_s_second: Some(pass()), ..Report::default() }
}

/// How often all queries are asked: nine times, or as often as it takes for 20,000 answers.
fn rounds(queries: usize) -> usize {
    20_000usize.div_ceil(queries.max(1)).max(9)
}

struct Latencies(Vec<u32>); // ns

impl Latencies {
    fn add(&mut self, d: Duration) {
        self.0.push(d.as_nanos().min(u32::MAX.into()) as u32);
    }

    fn report(mut self) -> Report {
        self.0.sort_unstable();
        let at = |share: f64| {
            let rank = (share * self.0.len() as f64).ceil() as usize; // nearest rank
            self.0.get(rank.clamp(1, self.0.len().max(1)) - 1).map(|ns| f64::from(*ns) / 1000.0)
        };
        Report { p50_us: at(0.5), p99_us: at(0.99), p999_us: at(0.999), ..Report::default() }
    }
}

/// Every query at the median of its times: what the machine did beside the index is left out.
fn typical(by_query: Vec<Vec<u32>>) -> Option<f64> {
    let medians = by_query
        .into_iter()
        .filter(|times| !times.is_empty())
        .map(|mut times| {
            times.sort_unstable();
            times[(times.len() - 1) / 2]
        })
        .collect();
    Latencies(medians).report().p999_us
}

fn prompts<P: Peer>(corpus: &'static Corpus) -> Vec<P::Prompt> {
    corpus.queries().map(P::prompt).collect()
}

/// queries: after all events, every query; per query the time from hashes in memory to scores in memory, and then, without
/// a clock in between, queries per second.
pub fn queries_one<P: Peer>(corpus: &'static Corpus) -> Report {
    let (index, mut writers) = P::new(corpus, 1);
    fill(&index, &mut writers, &corpus.ops);
    let prompts = prompts::<P>(corpus);
    let n = rounds(prompts.len());
    let mut answer = P::Answer::default();
    prompts.iter().for_each(|p| index.query(p.clone(), &mut answer));
    let mut took = Latencies(Vec::with_capacity(n * prompts.len()));
    for _ in 0..n {
        for prompt in &prompts {
            let prompt = prompt.clone();
            let start = Instant::now();
            index.query(prompt, &mut answer);
            took.add(start.elapsed());
        }
    }
    let by_query = (0..prompts.len()).map(|q| took.0.iter().skip(q).step_by(prompts.len()).copied().collect()).collect();
    let p999_typical_us = typical(by_query);
    let start = Instant::now();
    for _ in 0..n {
        prompts.iter().for_each(|p| index.query(p.clone(), &mut answer));
    }
    let rate = (n * prompts.len()) as f64 / start.elapsed().as_secs_f64();
    Report { queries_per_s: Some(rate), p999_typical_us, ..took.report() }
}

/// queries with several readers, each asking all queries from another place on.
pub fn queries_many<P: Peer + Sync>(corpus: &'static Corpus, threads: usize) -> Report {
    let (index, mut writers) = P::new(corpus, 1);
    fill(&index, &mut writers, &corpus.ops);
    let prompts = prompts::<P>(corpus);
    let n = rounds(prompts.len());
    let mut answer = P::Answer::default();
    prompts.iter().for_each(|p| index.query(p.clone(), &mut answer));
    let query = |reader: usize, i: usize| (i + reader * prompts.len() / threads) % prompts.len();
    let ask = |timed: bool| {
        let start = Instant::now();
        let all: Vec<Vec<u32>> = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..threads)
                .map(|t| {
                    let (index, prompts, query) = (&index, &prompts, &query);
                    scope.spawn(move || {
                        let mut answer = P::Answer::default();
                        let mut took = Latencies(Vec::with_capacity(if timed { n * prompts.len() } else { 0 }));
                        for i in 0..n * prompts.len() {
                            let prompt = prompts[query(t, i)].clone();
                            if !timed {
                                index.query(prompt, &mut answer);
                                continue;
                            }
                            let start = Instant::now();
                            index.query(prompt, &mut answer);
                            took.add(start.elapsed());
                        }
                        took.0
                    })
                })
                .collect();
            readers.into_iter().map(|r| r.join().expect("a reader does not panic")).collect()
        });
        (all, (threads * n * prompts.len()) as f64 / start.elapsed().as_secs_f64())
    };
    let (all, _) = ask(true);
    let (_, rate) = ask(false);
    let mut by_query = vec![Vec::new(); prompts.len()];
    for (reader, took) in all.iter().enumerate() {
        took.iter().enumerate().for_each(|(i, ns)| by_query[query(reader, i)].push(*ns));
    }
    Report { queries_per_s: Some(rate), p999_typical_us: typical(by_query), ..Latencies(all.concat()).report() }
}

/// mixed: all operations in the order of the file; each query sees all that came before it.
pub fn mixed<P: Peer>(corpus: &'static Corpus) -> Report {
    let (index, mut writers) = P::new(corpus, 1);
    let mut events = events::<P>(&corpus.ops, 1).remove(0).into_iter();
    let mut prompts = prompts::<P>(corpus).into_iter();
    let mut answer = P::Answer::default();
    let (mut digest, mut number, mut settled) = (0u64, 0u64, true);
    let start = Instant::now();
    for op in &corpus.ops {
        if worker_of(op).is_some() {
            index.apply(&mut writers[0], events.next().expect("one for each store and remove"));
            settled = false;
            continue;
        }
        if !settled {
            index.settle();
            settled = true;
        }
        index.query(prompts.next().expect("one for each query"), &mut answer);
        P::each(&answer, |worker, depth| {
            if depth > 0 {
                digest = digest.wrapping_add(mix(number << 40 ^ u64::from(worker) << 20 ^ u64::from(depth)));
            }
        });
        number += 1;
    }
    index.settle();
    Report { seconds: Some(start.elapsed().as_secs_f64()), digest: Some(digest), ..Report::default() }
}

/// memory: resident bytes after the events, less before, by holdings at the end; the allocator gives back what is free first.
pub fn memory<P: Peer>(corpus: &'static Corpus, collect: fn()) -> Result<Report, String> {
    let (index, mut writers) = P::new(corpus, 1);
    collect();
    let before = resident()?;
    fill(&index, &mut writers, &corpus.ops);
    collect();
    let after = resident()?;
    drop(index);
    let bytes = after.saturating_sub(before) as f64 / corpus.holdings as f64;
    Ok(Report { bytes_per_holding: Some(bytes), ..Report::default() })
}

/// Anonymous resident memory of this process, in bytes.
fn resident() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|e| format!("resident memory: {e}"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).ok_or("resident memory: no RssAnon")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").trim().parse().map_err(|e| format!("resident memory: {line}: {e}"))?;
    Ok(kib * 1024)
}

/// load: the first half of the operations' events, then one reader beside a writer that applies the other half at full
/// speed, until it has.
pub fn load<P: Peer + Sync>(corpus: &'static Corpus) -> Report {
    let (index, mut writers) = P::new(corpus, 1);
    let (first, second) = corpus.ops.split_at(corpus.ops.len() / 2);
    fill(&index, &mut writers, first);
    let events = events::<P>(second, 1).remove(0);
    let prompts = prompts::<P>(corpus);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut answer = P::Answer::default();
            let mut took = Latencies(Vec::with_capacity(1 << 22));
            let start = Instant::now();
            for prompt in prompts.iter().cycle() {
                let prompt = prompt.clone();
                let start = Instant::now();
                index.query(prompt, &mut answer);
                took.add(start.elapsed());
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
            let rate = took.0.len() as f64 / start.elapsed().as_secs_f64();
            Report { queries_per_s: Some(rate), ..took.report() }
        });
        let start = Instant::now();
        for (i, event) in events.into_iter().enumerate() {
            index.apply(&mut writers[0], event);
            if i % 1024 == 0 {
                index.settle();
            }
        }
        index.settle();
        let rate = blocks(second) as f64 / start.elapsed().as_secs_f64();
        done.store(true, Ordering::Relaxed);
        Report { blocks_per_s: Some(rate), ..reader.join().expect("the reader does not panic") }
    })
}
