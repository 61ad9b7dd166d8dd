//! Time, cost and energy of a whole training run.

use narrows_cost_model::{FailureEstimate, TrainingRunEstimate};

use super::page::{Align, Page};
use crate::text::{count, interval_90, percent, thousands};
use crate::unit::{Unit, duration_of};

/// Prints the run with its intervals and assumptions.
pub fn section(page: &mut Page, run: &TrainingRunEstimate) {
    page.heading(title(run));
    let days = Unit::Days.common(run.days_interval.into_iter().chain([run.days]));
    let interval = interval_90(run.days_interval, run.days_interval.map(|end| days.format(end)));
    let time = format!("{} ({interval})", days.format(run.days));
    let mut fields = vec![
        ("steps", thousands(run.steps)),
        ("time", time),
        ("device-hours", amount(run.device_hours, run.device_hours_interval, "")),
    ];
    if let (Some(dollars), Some(interval)) = (run.dollars, run.dollars_interval) {
        fields.push(("cost", amount(dollars, interval, "$")));
    }
    if let (Some(energy), Some(interval)) = (run.energy_kwh, run.energy_kwh_interval) {
        fields.push(("energy in kWh", amount(energy, interval, "")));
    }
    if let Some(failures) = &run.failures {
        fields.push(("failures", failures_phrase(failures)));
        fields.push(("checkpoints", checkpoints_phrase(failures)));
    }
    page.fields(&fields);
}

/// The heading of a run.
fn title(run: &TrainingRunEstimate) -> String {
    match run.tokens.round() as u64 {
        1 => "Run of 1 token".into(),
        tokens => format!("Run of {} tokens", count(tokens)),
    }
}

/// Prints the runs under several plans, a column each; nothing without runs.
pub fn table(page: &mut Page, runs: &[&TrainingRunEstimate], columns: &[(&str, Align)]) {
    let Some(first) = runs.first() else { return };
    let row = |name: &str, cell: &dyn Fn(&TrainingRunEstimate) -> Option<String>| {
        let cells = runs.iter().map(|run| cell(run).unwrap_or_default());
        std::iter::once(name.to_owned()).chain(cells).collect::<Vec<String>>()
    };
    let days = runs.iter().flat_map(|run| run.days_interval.into_iter().chain([run.days]));
    let unit = Unit::Days.common(days);
    let mut rows = vec![
        row(&format!("time in {}", unit.symbol()), &|run| Some(unit.number(run.days))),
        row("90 % low", &|run| Some(unit.number(run.days_interval[0]))),
        row("90 % high", &|run| Some(unit.number(run.days_interval[1]))),
        row("device-hours", &|run| Some(rounded(run.device_hours))),
        row("cost in $", &|run| run.dollars.map(rounded)),
        row("energy in kWh", &|run| run.energy_kwh.map(rounded)),
        row("goodput", &|run| run.failures.map(|failures| percent(failures.goodput))),
    ];
    rows.retain(|row| row[1..].iter().any(|cell| !cell.is_empty()));
    page.heading(title(first));
    page.table(columns, &rows);
}

/// A rounded number with thousands separators; small ones with decimals, and those below 0.01 with three significant digits.
pub fn rounded(value: f64) -> String {
    match value {
        100.0.. => thousands(value.round() as u64),
        0.01.. => format!("{value:.2}"),
        _ if value > 0.0 => format!("{value:.*}", decimals(value)),
        _ => format!("{value:.2}"),
    }
}

/// Decimals with which a number below 100 has three significant digits.
pub fn decimals(value: f64) -> usize {
    (2.0 - value.log10().floor()) as usize
}

fn amount(value: f64, interval: [f64; 2], unit: &str) -> String {
    let text = |value: f64| format!("{unit}{}", rounded(value));
    format!("{} ({})", text(value), interval_90(interval, interval.map(text)))
}

fn failures_phrase(failures: &FailureEstimate) -> String {
    format!(
        "{} expected, one every {}; goodput {}",
        rounded(failures.failures_expected),
        duration_of(failures.cluster_mtbf_hours * 3600.0),
        percent(failures.goodput)
    )
}

fn checkpoints_phrase(failures: &FailureEstimate) -> String {
    let every_step = match failures.checkpoint_interval_steps <= 1.0 {
        true => "after every step, the shortest interval: ",
        false => "",
    };
    format!(
        "{every_step}every {}, each {}; a restart {}",
        duration_of(failures.checkpoint_interval_s),
        duration_of(failures.checkpoint_s),
        duration_of(failures.restart_s)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_amounts_are_short() {
        assert_eq!((rounded(12.345), rounded(1234.5)), ("12.35".into(), "1,235".into()));
        assert_eq!((rounded(0.0070539), rounded(0.0)), ("0.00705".into(), "0.00".into()));
        assert_eq!(duration_of(90.0), "90.00 s");
        assert_eq!(duration_of(900.0), "15.0 minutes");
        assert_eq!(duration_of(10_800.0), "3.0 hours");
    }
}
