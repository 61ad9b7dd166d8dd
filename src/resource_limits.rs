//! Limits that the parent of this process has set, as `ulimit` does.

use std::io;

use narrows_plan::Bytes;

/// The limit on the CPU time of this process; `None` without one.
pub fn cpu_seconds() -> Option<u64> {
    #[cfg(unix)]
    #[allow(unsafe_code)]
    // SAFETY: the call only writes the plain struct that it is given.
    return limit(|limit| unsafe { libc::getrlimit(libc::RLIMIT_CPU, limit) });
    #[cfg(not(unix))]
    None
}

/// Advice after an error of a file, where this process may write no larger one.
pub fn file_size_hint(error: io::ErrorKind) -> Option<String> {
    if error != io::ErrorKind::FileTooLarge {
        return None;
    }
    Some(match file_bytes() {
        Some(bytes) => format!(
            "a higher limit of file sizes: `ulimit -f` allows this process {}",
            Bytes(bytes)
        ),
        None => "a file system for larger files: no `ulimit -f` limits this process".into(),
    })
}

/// The limit on the sizes of files that this process writes; `None` without one.
fn file_bytes() -> Option<u64> {
    #[cfg(unix)]
    #[allow(unsafe_code)]
    // SAFETY: the call only writes the plain struct that it is given.
    return limit(|limit| unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, limit) });
    #[cfg(not(unix))]
    None
}

#[cfg(unix)]
fn limit(read: impl FnOnce(&mut libc::rlimit) -> libc::c_int) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    let status = read(&mut limit);
    (status == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
