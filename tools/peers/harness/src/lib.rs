//! Runs one benchmark corpus through one peer's index and prints the figures as one line of JSON. It is built and called by
//! `go run ./tools/peers`.

mod corpus;
mod measure;
mod peer;

use std::path::Path;
use std::process::ExitCode;

use corpus::Corpus;
use measure::Report;
use peer::{Chain, Peer, Pool, Radix};

const USAGE: &str =
    "usage: peers --index chainindex|pool-crtc|radixtree --corpus FILE --mode events|queries|mixed|memory|load [--writers N] [--readers N]";

struct Args {
    index: String,
    corpus: String,
    mode: String,
    writers: usize,
    readers: usize,
}

fn args() -> Result<Args, String> {
    let mut a = Args { index: String::new(), corpus: String::new(), mode: String::new(), writers: 1, readers: 1 };
    let mut words = std::env::args().skip(1);
    while let Some(flag) = words.next() {
        let value = words.next().ok_or_else(|| format!("{flag}: no value\n{USAGE}"))?;
        let number = || value.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("{flag} {value}: not a number above zero"));
        match flag.as_str() {
            "--index" => a.index = value,
            "--corpus" => a.corpus = value,
            "--mode" => a.mode = value,
            "--writers" => a.writers = number()?,
            "--readers" => a.readers = number()?,
            _ => return Err(format!("{flag}: unknown\n{USAGE}")),
        }
    }
    Ok(a)
}

/// Why there are no figures, and the exit status that says so.
enum Failure {
    Wrong(String),       // 1
    Unsupported(String), // 3: this index cannot do that
}

impl From<String> for Failure {
    fn from(e: String) -> Self {
        Failure::Wrong(e)
    }
}

/// Runs the program. The allocator is that of the binary: its name is added to the index's, and collect makes it give back
/// what is free.
pub fn main(allocator: &str, collect: fn()) -> ExitCode {
    match run(allocator, collect) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(Failure::Wrong(e)) => {
            eprintln!("peers: {e}");
            ExitCode::FAILURE
        }
        Err(Failure::Unsupported(e)) => {
            eprintln!("peers: {e}");
            ExitCode::from(3)
        }
    }
}

fn run(allocator: &str, collect: fn()) -> Result<String, Failure> {
    let a = args()?;
    let corpus = Corpus::read(&a.corpus)?;
    let report = match a.index.as_str() {
        "chainindex" if corpus.workers > 1024 => return Err(Failure::Unsupported("chainindex is for at most 1,024 workers".into())),
        "chainindex" => shared::<Chain>(&a, corpus, collect)?,
        "pool-crtc" => shared::<Pool>(&a, corpus, collect)?,
        "radixtree" if a.writers > 1 || a.readers > 1 || a.mode == "load" => {
            return Err(Failure::Unsupported("radixtree is for one thread".into()));
        }
        "radixtree" => alone::<Radix>(&a.mode, corpus, collect)?,
        _ => return Err(format!("index {:?}: unknown\n{USAGE}", a.index).into()),
    };
    let name = Path::new(&a.corpus).file_stem().unwrap_or_default().to_string_lossy();
    Ok(json(&format!("{}{allocator}", a.index), &name, &a.mode, &report))
}

/// What one thread does alone.
fn alone<P: Peer>(mode: &str, corpus: &'static Corpus, collect: fn()) -> Result<Report, String> {
    Ok(match mode {
        "events" => measure::events_one::<P>(corpus),
        "queries" => measure::queries_one::<P>(corpus),
        "mixed" => measure::mixed::<P>(corpus),
        "memory" => measure::memory::<P>(corpus, collect)?,
        _ => return Err(format!("mode {mode:?}: unknown\n{USAGE}")),
    })
}

/// For an index that several threads may use.
fn shared<P: Peer + Sync>(a: &Args, corpus: &'static Corpus, collect: fn()) -> Result<Report, String> {
    Ok(match a.mode.as_str() {
        "load" => measure::load::<P>(corpus),
        "events" if a.writers > 1 => measure::events_many::<P>(corpus, a.writers),
        "queries" if a.readers > 1 => measure::queries_many::<P>(corpus, a.readers),
        mode => return alone::<P>(mode, corpus, collect),
    })
}

fn json(index: &str, corpus: &str, mode: &str, r: &Report) -> String {
    let mut line = format!("{{\"index\":{index:?},\"corpus\":{corpus:?},\"mode\":{mode:?}");
    for (name, value) in [
        ("blocks_per_s", r.blocks_per_s),
        ("blocks_per_s_second", r.blocks_per_s_second),
        ("p50_us", r.p50_us),
        ("p99_us", r.p99_us),
        ("p999_us", r.p999_us),
        ("p999_typical_us", r.p999_typical_us),
        ("queries_per_s", r.queries_per_s),
        ("bytes_per_holding", r.bytes_per_holding),
        ("seconds", r.seconds),
    ] {
        if let Some(value) = value {
            line += &format!(",\"{name}\":{value}");
        }
    }
    if let Some(digest) = r.digest {
        line += &format!(",\"digest\":\"{digest:016x}\"");
    }
    line + "}"
}
