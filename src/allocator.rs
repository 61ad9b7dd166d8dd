//! The allocator of the program: mimalloc, which ends the program in order where the system refuses memory.
//!
//! By default a refused allocation aborts: a core dump, and an exit code that no scheduler tries again. Here the program
//! prints one sentence and ends with [`ExitStatus::Environment`], as on a full disk. Nothing is allocated for that, and
//! nothing is dropped: files under temporary names remain, and files under their final names are whole.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::io::{Cursor, Write};
use std::sync::atomic::{AtomicU8, Ordering};

use mimalloc::MiMalloc;

use crate::errors::ExitStatus;

/// Exit code of the failure whose message a thread prints; 0 before. There is one message.
static ENDING_CODE: AtomicU8 = AtomicU8::new(0);

thread_local! {
    /// Whether this thread prints a failure of the command.
    static PRINTS_FAILURE: Cell<bool> = const { Cell::new(false) };
}

/// Says that this thread prints a failure and ends the program: another thread that is refused memory adds no message. Waits for
/// the end where such a thread has printed its own.
pub fn begin_failure(status: ExitStatus) {
    if claim(status).is_err() {
        wait_for_end();
    }
    PRINTS_FAILURE.set(true);
}

fn claim(status: ExitStatus) -> Result<u8, u8> {
    ENDING_CODE.compare_exchange(0, status.code(), Ordering::Relaxed, Ordering::Relaxed)
}

fn wait_for_end() -> ! {
    loop {
        std::thread::park();
    }
}

/// The allocator.
pub struct Allocator;

// SAFETY: every method passes its arguments to the same method of mimalloc and returns its result.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        present(unsafe { MiMalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        present(unsafe { MiMalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        present(unsafe { MiMalloc.realloc(block, layout, new_size) }, new_size)
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { MiMalloc.dealloc(block, layout) }
    }
}

/// A block of memory; ends the program if there is none.
fn present(block: *mut u8, bytes: usize) -> *mut u8 {
    if block.is_null() {
        end_without_memory(bytes);
    }
    block
}

#[cold]
fn end_without_memory(bytes: usize) -> ! {
    let status = match claim(ExitStatus::Environment) {
        Ok(_) => {
            print_refusal(bytes);
            ExitStatus::Environment.code().into()
        }
        Err(code) if PRINTS_FAILURE.get() => code.into(),
        Err(_) => wait_for_end(),
    };
    #[cfg(unix)]
    // SAFETY: ends the process at once. Functions that run at exit may allocate.
    unsafe {
        libc::_exit(status)
    }
    #[cfg(not(unix))]
    std::process::exit(status)
}

fn print_refusal(bytes: usize) {
    let mut message = Cursor::new([0; 160]);
    // The array is long enough.
    let _ = writeln!(
        message,
        "error: memory: the system refuses {bytes} bytes more\n  hint: `ulimit -v` and the limit of the container, or a \
         smaller request"
    );
    let length = message.position() as usize;
    // Standard error has no buffer.
    let _ = std::io::stderr().write_all(&message.into_inner()[..length]);
}
