//! The program `narrows`.

/// A search allocates millions of small lists on all threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    narrows::main()
}
