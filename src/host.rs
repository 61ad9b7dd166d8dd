//! Cores and memory of this machine.

use std::fs;
use std::thread::available_parallelism;

use narrows_plan::Bytes;

/// Cores that this program may use.
pub fn cores() -> u64 {
    available_parallelism().map_or(1, |cores| cores.get() as u64)
}

/// The cores that this program may use as the kernel lists them, such as `0-3,8`; `None` where the system does not.
pub fn allowed_cores() -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(list.trim().to_owned())
}

/// Memory that programs can still allocate on this machine, within the limit of the control group; `None` where the
/// system does not report it. A program that exceeds it is killed without a message.
pub fn available_memory() -> Option<Bytes> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let machine = meminfo_bytes(&meminfo, "MemAvailable:")?;
    Some(Bytes(machine.min(cgroup_remaining().unwrap_or(u64::MAX))))
}

/// Memory of this machine, or the limit of the control group; `None` where the system does not report it.
pub fn total_memory() -> Option<Bytes> {
    let machine = meminfo_bytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    Some(Bytes(machine.min(cgroup_bytes("memory.max").unwrap_or(u64::MAX))))
}

/// A field of `/proc/meminfo` in bytes.
fn meminfo_bytes(meminfo: &str, field: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A number of the control group; `None` without a group or a limit.
fn cgroup_bytes(file: &str) -> Option<u64> {
    fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse().ok()
}

/// Bytes left under the limit of the control group.
fn cgroup_remaining() -> Option<u64> {
    // `memory.current` includes the page cache, which the kernel reclaims on demand.
    let used = cgroup_bytes("memory.current")?;
    let statistics = fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let cached = statistics.lines().find_map(|line| line.strip_prefix("file ")?.parse().ok());
    Some(cgroup_bytes("memory.max")?.saturating_sub(used.saturating_sub(cached.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_fields_are_parsed_and_malformed_ones_ignored() {
        let meminfo = "MemTotal:       16000000 kB\nMemAvailable:    4096 kB\n";
        assert_eq!(meminfo_bytes(meminfo, "MemAvailable:"), Some(4 << 20));
        for malformed in ["", "MemAvailable:", "MemAvailable: many kB", "MemAvailable: 4096"] {
            assert_eq!(meminfo_bytes(malformed, "MemAvailable:"), None, "{malformed}");
        }
    }
}
