//! Panics of libraries that read files of users.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of calls of [`catch_panic`] in progress.
static CATCHING: AtomicUsize = AtomicUsize::new(0);

/// Runs code of a library that panics on some malformed files, and returns the panic as a message that begins with
/// `subject`, what failed. What the task refers to must not be used after a panic.
pub fn catch_panic<T>(subject: &str, task: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if CATCHING.load(Ordering::SeqCst) == 0 {
                hook(panic);
            }
        }));
    });
    CATCHING.fetch_add(1, Ordering::SeqCst);
    let result = panic::catch_unwind(AssertUnwindSafe(task));
    CATCHING.fetch_sub(1, Ordering::SeqCst);
    result.map_err(|panic| {
        let message = panic.downcast_ref::<&str>().map(ToString::to_string);
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
        format!("{subject} failed: {}", message.unwrap_or_else(|| "no message".into()))
    })
}
