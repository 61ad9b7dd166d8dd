//! The program `narrows`.

/// A search allocates millions of small lists on all threads.
#[global_allocator]
static ALLOCATOR: narrows::Allocator = narrows::Allocator;

fn main() -> std::process::ExitCode {
    narrows::main()
}
