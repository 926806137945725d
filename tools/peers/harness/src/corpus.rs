//! A corpus file in memory, in the forms in which the peers take it. The format is described in the doc comment of the Go
//! package tools/corpus.

use std::mem::MaybeUninit;

use kv_index::{ContentHash, SequenceHash, StoredBlock};

pub enum Op {
    Store { worker: u32, parent: Option<u64>, blocks: &'static [StoredBlock] },
    Remove { worker: u32, names: &'static [SequenceHash] },
    Query { locals: &'static [u64] },
}

pub struct Corpus {
    pub workers: u32,
    pub block_size: u32,
    pub blocks: u64, // stored and removed
    pub holdings: u64,
    pub ops: Vec<Op>,
}

impl Corpus {
    /// Reads a corpus for the whole life of the process.
    pub fn read(path: &str) -> Result<&'static Corpus, String> {
        let data = std::fs::read(path).map_err(|e| format!("{path}: {e}"))?;
        parse(&data).map(|c| &*Box::leak(Box::new(c))).map_err(|e| format!("{path}: {e}"))
    }

    pub fn queries(&'static self) -> impl Iterator<Item = &'static [u64]> {
        self.ops.iter().filter_map(|op| match op {
            Op::Query { locals } => Some(*locals),
            _ => None,
        })
    }
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn u32(&mut self) -> Result<u32, String> {
        let (head, tail) = self.0.split_first_chunk::<4>().ok_or("ends too early")?;
        self.0 = tail;
        Ok(u32::from_le_bytes(*head))
    }

    fn u64(&mut self) -> Result<u64, String> {
        let (head, tail) = self.0.split_first_chunk::<8>().ok_or("ends too early")?;
        self.0 = tail;
        Ok(u64::from_le_bytes(*head))
    }
}

/// A column of the corpus: mapped in huge pages whatever the allocator, and for the life of the process, so that all
/// programs that are compared read the same operations from memory of the same kind.
struct Column<T: 'static> {
    at: &'static mut [MaybeUninit<T>],
    len: usize,
}

impl<T: Copy> Column<T> {
    fn new(most: u64) -> Result<Self, String> {
        let most = most as usize;
        if most == 0 {
            return Ok(Column { at: &mut [], len: 0 });
        }
        let size = most.checked_mul(size_of::<T>()).ok_or("more than can be addressed")?;
        // SAFETY: a private anonymous mapping of its own. It is page-aligned, zeroed and never unmapped.
        let at = unsafe {
            let at =
                libc::mmap(std::ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_ANONYMOUS | libc::MAP_PRIVATE, -1, 0);
            if at == libc::MAP_FAILED {
                return Err(format!("take {size} bytes: {}", std::io::Error::last_os_error()));
            }
            libc::madvise(at, size, libc::MADV_HUGEPAGE);
            std::slice::from_raw_parts_mut(at.cast(), most)
        };
        Ok(Column { at, len: 0 })
    }

    fn push(&mut self, value: T) {
        self.at[self.len].write(value);
        self.len += 1;
    }

    fn all(self) -> &'static [T] {
        // SAFETY: the first len have been written.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr().cast(), self.len) }
    }
}

fn parse(data: &[u8]) -> Result<Corpus, String> {
    let mut b = Bytes(data.strip_prefix(b"KVCORP01").ok_or("not a corpus")?);
    let (workers, block_size) = (b.u32()?, b.u32()?);
    let mut counts = [0; 9];
    for c in &mut counts {
        *c = b.u64()?;
    }
    let [ops, stored, removed, _, query_blocks, stores, .., holdings, _] = counts;
    let sum = |xs: &[(u64, u64)]| xs.iter().try_fold(0u64, |sum, (n, size)| n.checked_mul(*size)?.checked_add(sum));
    if sum(&[(88, 1), (ops, 12), (stores, 8), (stored, 16), (removed, 8), (query_blocks, 8)]) != Some(data.len() as u64) {
        return Err("the header's counts do not make up the file".into());
    }

    // Columns first, so that operations can point into them.
    enum Place {
        Store(u32, Option<u64>, usize, usize),
        Remove(u32, usize, usize),
        Query(usize, usize),
    }
    let mut places = Vec::with_capacity(ops as usize);
    let mut blocks = Column::new(stored)?;
    let mut names = Column::new(removed)?;
    let mut locals = Column::new(query_blocks)?;
    for _ in 0..ops {
        let (kind, worker, n) = (b.u32()?, b.u32()?, b.u32()? as usize);
        if worker >= workers {
            return Err(format!("operation {}: worker {worker} of {workers}", places.len()));
        }
        match kind {
            0x001 | 0x101 => {
                let parent = b.u64()?;
                let at = blocks.len;
                for _ in 0..n {
                    blocks.push(StoredBlock { seq_hash: SequenceHash(b.u64()?), content_hash: ContentHash(b.u64()?) });
                }
                places.push(Place::Store(worker, (kind == 0x101).then_some(parent), at, n));
            }
            0x002 => {
                let at = names.len;
                for _ in 0..n {
                    names.push(SequenceHash(b.u64()?));
                }
                places.push(Place::Remove(worker, at, n));
            }
            0x003 => {
                let at = locals.len;
                for _ in 0..n {
                    locals.push(b.u64()?);
                }
                places.push(Place::Query(at, n));
            }
            _ => return Err(format!("operation {}: unknown kind and flags {kind:#x}", places.len())),
        }
    }
    let (blocks, names, locals): (&[StoredBlock], &[SequenceHash], &[u64]) = (blocks.all(), names.all(), locals.all());
    let ops = places
        .into_iter()
        .map(|place| match place {
            Place::Store(worker, parent, at, n) => Op::Store { worker, parent, blocks: &blocks[at..at + n] },
            Place::Remove(worker, at, n) => Op::Remove { worker, names: &names[at..at + n] },
            Place::Query(at, n) => Op::Query { locals: &locals[at..at + n] },
        })
        .collect();
    Ok(Corpus { workers, block_size, blocks: stored + removed, holdings, ops })
}

/// One output step of SplitMix64.
pub fn mix(x: u64) -> u64 {
    let mut x = x.wrapping_add(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d049bb133111eb);
    x ^ (x >> 31)
}
