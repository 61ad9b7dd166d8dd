//! Whether the machine has the memory that a run takes. Asked before any of it is allocated: later,
//! the system would end the program without a word.

use std::fs;

use narrows_plan::Bytes;

/// Memory that programs may still take on this machine; `None` where the system does not say.
pub fn available() -> Option<Bytes> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let machine = field(&text, "MemAvailable:")?;
    Some(Bytes(machine.min(left_in_group().unwrap_or(u64::MAX))))
}

/// Memory of this machine, or what its container may take; `None` where the system does not say.
pub fn total() -> Option<Bytes> {
    let machine = field(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    Some(Bytes(machine.min(of_group("memory.max").unwrap_or(u64::MAX))))
}

/// A field of `/proc/meminfo`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A number that the container's group says; `None` where it has none, or no limit.
fn of_group(name: &str) -> Option<u64> {
    fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse().ok()
}

/// What a container's limit leaves.
fn left_in_group() -> Option<u64> {
    // Cached files count as used there, and would be given back: they are not counted against us.
    let used = of_group("memory.current")?;
    let statistics = fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let cached = statistics.lines().find_map(|line| line.strip_prefix("file ")?.parse().ok());
    Some(of_group("memory.max")?.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_is_believed_only_where_it_says_something() {
        let text = "MemTotal:       16000000 kB\nMemAvailable:    4096 kB\n";
        assert_eq!(field(text, "MemAvailable:"), Some(4 << 20));
        for nothing in ["", "MemAvailable:", "MemAvailable: many kB", "MemAvailable: 4096"] {
            assert_eq!(field(nothing, "MemAvailable:"), None, "{nothing}");
        }
    }
}
