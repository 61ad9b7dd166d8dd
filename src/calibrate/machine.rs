//! Which machine this is: what a measured profile says of where it comes from.

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

/// What a device may hold where the system does not say how much there is.
const MEMORY: Bytes = Bytes(4 << 30);

/// The processor's name and the threads that are used of it.
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

/// Everything a profile says of this machine.
pub fn describe(threads: u64, command: &str) -> CpuMachine {
    let title = title(threads);
    CpuMachine {
        name: NAME.into(),
        description: format!(
            "{title}, as `narrows calibrate` measured it. Devices are threads that share the machine: \
             each of D has 1/D of it."
        ),
        title: title.clone(),
        memory: total_memory().unwrap_or(MEMORY),
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        source: format!("{command}, on {title}"),
        date: today(),
    }
}

/// The day by the system's clock, in UTC, `YYYY-MM-DD`.
pub fn today() -> String {
    date(SystemTime::now())
}

fn date(time: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.split('T').next().unwrap_or_default().to_owned()
}

/// Why a measured profile says nothing of this machine with so many threads; `None` where it does, or does
/// not say of which machine it is.
pub fn other(profile: &Profile, threads: u64) -> Option<String> {
    let measured =
        profile.file().measured.as_ref().filter(|measured| measured.devices_share_machine())?;
    let (there, here) = (measured.machine.as_deref()?, title(threads));
    let name = profile.name();
    (there != here).then(|| {
        format!(
            "`{name}` was measured on another machine or with other threads ({there}; here {here}): its \
             predictions are not of this one; `narrows calibrate` measures it"
        )
    })
}

/// The same of a profile of GPUs.
pub fn other_gpus(profile: &Profile) -> Option<String> {
    let measured =
        profile.file().measured.as_ref().filter(|measured| !measured.devices_share_machine())?;
    let (there, here) = (measured.machine.as_deref()?, gpu::description()?);
    let name = profile.name();
    (there != here).then(|| {
        format!(
            "`{name}` was measured on other GPUs, or with another driver or libraries ({there}; here {here}): its \
             predictions are not of these; `narrows calibrate --backend cuda` measures them"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use narrows_cost_model::profile;

    use super::{date, other, title};

    #[test]
    fn days_have_the_form_that_profiles_ask_for() {
        let days = |count: u64| date(UNIX_EPOCH + Duration::from_secs(count * 86_400 + 86_399));
        assert_eq!([days(59), days(20_778)], ["1970-03-01", "2026-11-21"]);
    }

    #[test]
    fn a_profile_is_one_of_a_machine() {
        let preset = profile::preset("cpu-local").unwrap();
        assert_eq!(other(&preset, 2), None, "a preset is of no machine");
        let kernel =
            r#"{"transfer": {"bytes": 1, "group": {"axis": "tensor", "size": 2, "stride": 1}}}"#;
        let point = format!(r#"{{"kernel": {kernel}, "devices": 2, "time_s": 1e-3, "spread": 0}}"#);
        let of = |machine: &str| {
            let provenance = r#"{"kind": "measured", "source": "a test", "date": "2026-11-21"}"#;
            let measured = format!(
                r#"{{"threads": 2, "machine": "{machine}", "points": [{point}], "provenance": {provenance}}}"#
            );
            let mut file = preset.file().clone();
            file.measured = Some(serde_json::from_str(&measured).unwrap());
            file.resolve().unwrap()
        };
        assert_eq!(other(&of(&title(2)), 2), None);
        assert!(other(&of(&title(2)), 3).unwrap().contains("other threads"));
        assert!(other(&of("an abacus, 2 threads"), 2).unwrap().contains("an abacus, 2 threads"));
    }
}
