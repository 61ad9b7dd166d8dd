//! Which machine this is: what a measured profile says of where it comes from.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use narrows_cost_model::fit::Machine;
use narrows_plan::Bytes;

use crate::memory;
use crate::report::page::plural;

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
pub fn describe(threads: u64, command: &str) -> Machine {
    let title = title(threads);
    Machine {
        name: NAME.into(),
        description: format!(
            "{title}, as `narrows calibrate` measured it. Devices are threads that share the machine: \
             each of D has 1/D of it."
        ),
        memory: memory::total().unwrap_or(MEMORY),
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        source: format!("{command}, on {title}"),
        date: today(),
    }
}

/// The day by the system's clock, in UTC.
pub fn today() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date(since.as_secs() / 86_400)
}

/// The day so many days after 1970-01-01, by the rules of the Gregorian calendar. Years are counted
/// from March, so that the day that leap years add is their last.
fn date(days: u64) -> String {
    let days = days + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn days_are_counted_as_the_calendar_does() {
        let cases =
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_778, "2026-11-21")];
        for (days, expected) in cases {
            assert_eq!(date(days), expected);
        }
    }
}
