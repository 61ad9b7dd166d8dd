//! The allocator of the program: mimalloc, which ends the program in order where the system refuses memory.
//!
//! By default a refused allocation aborts: a core dump, and an exit code that no scheduler tries again. Here the program
//! prints one sentence and ends with [`ExitStatus::Environment`], as on a full disk. Nothing is allocated for that, and
//! nothing is dropped: files under temporary names remain, and files under their final names are whole.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::io::{Cursor, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use mimalloc::MiMalloc;

use crate::errors::ExitStatus;

/// Whether a thread ends the program.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

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
    // Other threads that are refused memory wait for the end.
    while IS_ENDING.swap(true, Ordering::Relaxed) {
        std::thread::park();
    }
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
    let status = ExitStatus::Environment.code().into();
    #[cfg(unix)]
    // SAFETY: ends the process at once. Functions that run at exit may allocate.
    unsafe {
        libc::_exit(status)
    }
    #[cfg(not(unix))]
    std::process::exit(status)
}
