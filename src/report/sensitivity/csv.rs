//! A sensitivity analysis as CSV.

use super::rows::{AssumedRow, ElasticityRow, UpgradeRow};
use crate::sensitivity::{Estimate, UPGRADES};
use crate::text::csv_table;

/// A row for each number whose columns were all planned, as CSV (RFC 4180).
pub fn csv(
    elasticities: &[ElasticityRow],
    upgrades: &[UpgradeRow],
    assumed: &[AssumedRow],
) -> String {
    let estimate = |estimate: Option<Estimate>| {
        let cells = estimate.map(|Estimate { value, interval: [low, high] }| [value, low, high]);
        cells.map_or_else(|| vec![String::new(); 3], |cells| cells.map(text).to_vec())
    };
    let rows = elasticities.iter().filter(|row| row.is_complete).map(|row| {
        let upgrade = upgrades.iter().find(|upgrade| upgrade.number == row.number);
        let error = assumed.iter().find(|assumed| assumed.number == row.number);
        let gains = (0..UPGRADES.len()).map(|index| {
            let gain = upgrade.and_then(|upgrade| upgrade.gains[index].gain);
            gain.map_or(String::new(), |gain| text(gain.value))
        });
        let change = error.and_then(|row| row.change.as_ref());
        let losses = error.map_or([None; 2], |row| row.losses);
        let kind = serde_json::to_value(row.kind).unwrap_or_default();
        [row.number.to_string(), kind.as_str().unwrap_or_default().into(), text(row.value)]
            .into_iter()
            .chain([row.is_assumed.to_string()])
            .chain(row.factors.map(text))
            .chain(estimate(Some(row.replanned)))
            .chain(estimate(row.kept_plan))
            .chain(gains)
            .chain([change.map_or(String::new(), |change| text(change.value))])
            .chain(losses.map(|loss| loss.map_or(String::new(), text)))
            .collect::<Vec<_>>()
    });
    csv_table(&CSV_COLUMNS, rows)
}

const CSV_COLUMNS: [&str; 17] = [
    "number",
    "kind",
    "value",
    "is_assumed",
    "factor_low",
    "factor_high",
    "elasticity",
    "elasticity_low",
    "elasticity_high",
    "kept_elasticity",
    "kept_elasticity_low",
    "kept_elasticity_high",
    "gain_10_percent",
    "gain_double",
    "plan_changes_at",
    "loss_at_half",
    "loss_at_double",
];

fn text(number: f64) -> String {
    number.to_string()
}
