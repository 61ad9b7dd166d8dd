//! The command line of Narrows as a module of Python: `narrows._narrows`.
//!
//! `package/narrows/` has the functions and types that people use; each makes arguments of its parameters and reads the
//! JSON of the answer, so that there is no second interface to keep equal.
#![cfg(feature = "extension")]

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// A search allocates millions of small lists on all threads.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Time between two looks at the signals of the interpreter.
const POLL: Duration = Duration::from_millis(20);

/// Stack of the thread that runs a command: that of a main thread.
const STACK_BYTES: usize = 8 << 20;

/// Runs a command of `narrows` and returns its exit code, standard output and standard error. Other threads of Python run
/// meanwhile. A signal whose handler raises, as that of Ctrl-C does, stops the command.
#[pyfunction]
fn answer(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<(u8, String, String)> {
    let stop = Arc::new(AtomicBool::new(false));
    let (sender, mut receiver) = mpsc::channel();
    let flag = Arc::clone(&stop);
    let work = move || {
        // The caller does not read the answer after a signal.
        let _ = sender.send(narrows::answer(arguments, flag));
    };
    thread::Builder::new().name("narrows".into()).stack_size(STACK_BYTES).spawn(work)?;
    loop {
        let receiver = &mut receiver;
        match py.detach(move || receiver.recv_timeout(POLL)) {
            Ok(answer) => return Ok((answer.exit_code, answer.output, answer.messages)),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals().inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("narrows panicked; see standard error"));
            }
        }
    }
}

/// The module.
#[pymodule]
fn _narrows(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(answer, module)?)
}
