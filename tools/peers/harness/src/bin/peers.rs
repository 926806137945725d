//! The peers with the C library's allocator, as a Rust program has it by default.

fn collect() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim may be called at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn main() -> std::process::ExitCode {
    kvatlas_peers::main("", collect)
}
