//! Identification of the machine of a profile.

use std::fs;
use std::time::SystemTime;

use narrows_calibration::fit::CpuMachine;
use narrows_cost_model::Profile;
use narrows_plan::Bytes;

use crate::gpu;
use crate::host::total_memory;
use crate::text::plural;

/// The name of a measured profile.
pub const NAME: &str = "cpu-measured";

/// Memory in a profile if the system does not report any.
const FALLBACK_MEMORY: Bytes = Bytes(4 << 30);

/// Name of the CPU and number of threads in use, which identify a measurement.
pub fn title(threads: u64) -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name"));
    let name = name.and_then(|rest| rest.split_once(':')).map(|(_, name)| name.trim());
    let family = |field: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(field))?;
        value.trim_start_matches(['\t', ' ', ':']).split_whitespace().next().map(str::to_owned)
    };
    let model = match (family("cpu family"), family("model\t")) {
        (Some(family), Some(model)) => format!(", family {family} model {model}"),
        _ => String::new(),
    };
    let name = name.unwrap_or(std::env::consts::ARCH);
    format!("{name}{model}, {}", plural(threads, "thread"))
}

/// The description of this machine in a profile. `command` is the command of the measurement.
pub fn describe(threads: u64, command: &str) -> CpuMachine {
    let title = title(threads);
    CpuMachine {
        name: NAME.into(),
        description: format!(
            "{title}, measured by `narrows calibrate`. Devices are groups of threads that share the machine: \
             each of D devices has 1/D of it."
        ),
        title: title.clone(),
        memory: total_memory().unwrap_or(FALLBACK_MEMORY),
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        source: format!("{command}, on {title}"),
        date: today(),
    }
}

/// The date of the system's clock, in UTC: `YYYY-MM-DD`.
pub fn today() -> String {
    date(SystemTime::now())
}

fn date(time: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.split('T').next().unwrap_or_default().to_owned()
}

/// A warning if a profile was measured on another machine or with other threads. `None` also for a profile that does not
/// name its machine.
pub fn other_machine_warning(profile: &Profile, threads: u64) -> Option<String> {
    let measured =
        profile.file().measured.as_ref().filter(|measured| measured.devices_share_machine())?;
    let (measured_on, this) = (measured.machine.as_deref()?, title(threads));
    let name = profile.name();
    (measured_on != this).then(|| {
        format!(
            "`{name}` was measured on another machine or with other threads ({measured_on}; here {this}), so its \
             predictions are not for this one: `narrows calibrate` measures it"
        )
    })
}

/// A warning if a profile was measured on other GPUs, or with another driver or libraries.
pub fn other_gpus_warning(profile: &Profile) -> Option<String> {
    let measured =
        profile.file().measured.as_ref().filter(|measured| !measured.devices_share_machine())?;
    let (measured_on, these) = (measured.machine.as_deref()?, gpu::description()?);
    let name = profile.name();
    (measured_on != these).then(|| {
        format!(
            "`{name}` was measured on other GPUs, or with another driver or libraries ({measured_on}; here {these}), \
             so its predictions are not for these: `narrows calibrate --backend cuda` measures them"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use narrows_cost_model::profile;

    use super::{date, other_machine_warning, title};

    #[test]
    fn dates_are_year_month_day() {
        let day = |count: u64| date(UNIX_EPOCH + Duration::from_secs(count * 86_400 + 86_399));
        assert_eq!([day(59), day(20_778)], ["1970-03-01", "2026-11-21"]);
    }

    #[test]
    fn profiles_of_other_machines_cause_a_warning() {
        let preset = profile::preset("cpu-local").unwrap();
        assert_eq!(other_machine_warning(&preset, 2), None, "a preset names no machine");
        let kernel =
            r#"{"transfer": {"bytes": 1, "group": {"axis": "tensor", "size": 2, "stride": 1}}}"#;
        let point = format!(r#"{{"kernel": {kernel}, "devices": 2, "time_s": 1e-3, "spread": 0}}"#);
        let measured_on = |machine: &str| {
            let provenance = r#"{"kind": "measured", "source": "a test", "date": "2026-11-21"}"#;
            let measured = format!(
                r#"{{"threads": 2, "machine": "{machine}", "points": [{point}], "provenance": {provenance}}}"#
            );
            let mut file = preset.file().clone();
            file.measured = Some(serde_json::from_str(&measured).unwrap());
            file.resolve().unwrap()
        };
        let warning =
            |machine: &str, threads| other_machine_warning(&measured_on(machine), threads);
        assert_eq!(warning(&title(2), 2), None);
        assert!(warning(&title(2), 3).unwrap().contains("other threads"));
        assert!(warning("an abacus, 2 threads", 2).unwrap().contains("an abacus, 2 threads"));
    }
}
