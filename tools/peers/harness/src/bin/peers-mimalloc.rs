//! The peers with mimalloc, which the authors of kv-index link into their benchmarks.

#[global_allocator]
static GLOBAL: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn collect() {
    // SAFETY: mi_collect may be called at any time.
    unsafe { libmimalloc_sys::mi_collect(true) }
}

fn main() -> std::process::ExitCode {
    kvatlas_peers::main("+mimalloc", collect)
}
