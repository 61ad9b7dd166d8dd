//! Limits that the parent of this process has set, as `ulimit` does.

use std::io;

use narrows_plan::Bytes;

/// A limit on the CPU time of this process.
#[derive(Clone, Copy, Debug)]
pub struct CpuLimit {
    /// CPU time after which the process is ended, or signalled for the first time, in seconds.
    pub seconds: u64,
    /// Part of it that is left at the first signal, in seconds.
    pub reserved_s: u64,
}

/// The limit on the CPU time of this process; `None` without one.
pub fn cpu_limit() -> Option<CpuLimit> {
    #[cfg(unix)]
    return cpu_rlimit().map(|limit| CpuLimit { seconds: limit.rlim_cur, reserved_s: 0 });
    #[cfg(not(unix))]
    None
}

/// As [`cpu_limit`]. Where the kernel would end the process at the limit without a signal before, as after `ulimit -t` without
/// `-S`, it sends one from now on when a tenth of the time is left, at least one second and at most a minute.
pub fn reserve_cpu_time() -> Option<CpuLimit> {
    #[cfg(unix)]
    {
        let mut limit = cpu_rlimit()?;
        let seconds = limit.rlim_cur;
        let mut reserved_s = (seconds / 10).clamp(1, 60);
        limit.rlim_cur = seconds.saturating_sub(reserved_s);
        #[allow(unsafe_code)]
        // SAFETY: the call only reads the plain struct that it is given.
        let is_reserved = seconds == limit.rlim_max
            && limit.rlim_cur > 0
            && unsafe { libc::setrlimit(libc::RLIMIT_CPU, &limit) } == 0;
        if !is_reserved {
            reserved_s = 0;
        }
        Some(CpuLimit { seconds, reserved_s })
    }
    #[cfg(not(unix))]
    None
}

#[cfg(unix)]
fn cpu_rlimit() -> Option<libc::rlimit> {
    #[allow(unsafe_code)]
    // SAFETY: the call only writes the plain struct that it is given.
    limit(|limit| unsafe { libc::getrlimit(libc::RLIMIT_CPU, limit) })
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
    return limit(|limit| unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, limit) })
        .map(|limit| limit.rlim_cur);
    #[cfg(not(unix))]
    None
}

#[cfg(unix)]
fn limit(read: impl FnOnce(&mut libc::rlimit) -> libc::c_int) -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    let status = read(&mut limit);
    (status == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit)
}
