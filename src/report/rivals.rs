//! An explanation for people: what binds the plan, and what else there was.

use narrows_plan::strategy::Zero;
use narrows_plan::{Bytes, Seconds};
use narrows_planner::{
    Alternative, ContextOutcome, Explanation, MeshRow, Prediction, Request, SearchResult,
};

use super::page::{Align, TextPage, plural};
use super::text::how_it_went;
use crate::commands::GivenPlan;

/// The whole explanation.
pub fn text(
    request: &Request,
    searched: &SearchResult,
    explanation: &Explanation,
    given: Option<&GivenPlan>,
) -> String {
    let mut page = TextPage::default();
    let devices = plural(request.devices, "device");
    page.heading(format!("{} on {devices} of {}", request.model.name, request.profile.name()));
    if let Some(chosen) = &explanation.chosen {
        page.paragraph(&chosen.summary);
        page.heading("What binds it");
        explanation.binds.iter().for_each(|bottleneck| page.paragraph(&bottleneck.to_string()));
    }
    alternatives(&mut page, explanation, given);
    meshes(&mut page, &explanation.meshes, explanation.meshes_not_listed);
    page.heading("Search");
    page.line(how_it_went(&searched.report));
    page.finish()
}

const COLUMNS: [(&str, Align); 8] = [
    ("plan", Align::Left),
    ("step time", Align::Right),
    ("against it", Align::Right),
    ("products", Align::Right),
    ("attention", Align::Right),
    ("passes", Align::Right),
    ("collectives", Align::Right),
    ("memory", Align::Right),
];

fn alternatives(page: &mut TextPage, explanation: &Explanation, given: Option<&GivenPlan>) {
    let Some(chosen) = &explanation.chosen else { return };
    page.heading("What else there was");
    let mut rows = vec![priced(&chosen.name, chosen.prediction.as_ref(), None)];
    if let (Some(given), Some(best)) = (given, &chosen.prediction) {
        let ratio = given.prediction.step_time_s / best.step_time_s;
        rows.push(priced(&given.name, Some(&given.prediction), Some(ratio)));
    }
    let runs = |alternative: &&Alternative| alternative.prediction.is_some();
    rows.extend(explanation.alternatives.iter().filter(runs).map(|alternative| {
        priced(&alternative.name, alternative.prediction.as_ref(), alternative.ratio)
    }));
    page.table(&COLUMNS, &rows);
    for alternative in &explanation.alternatives {
        if let Some(refusal) = &alternative.refusal {
            page.paragraph(&format!("{}: {refusal}", alternative.name));
        }
    }
}

fn priced(name: &str, prediction: Option<&Prediction>, ratio: Option<f64>) -> Vec<String> {
    let mut row = vec![name.to_owned()];
    if let Some(prediction) = prediction {
        let parts = &prediction.breakdown_s;
        let peak = prediction.peak_memory_bytes.iter().copied().max().unwrap_or(0);
        let time = |seconds: f64| Seconds(seconds).to_string();
        row.extend([
            time(prediction.step_time_s),
            ratio.map_or(String::new(), |ratio| format!("{ratio:.3} ×")),
            time(parts.gemm),
            time(parts.attention),
            time(parts.elementwise + parts.optimizer),
            time(parts.collective_exposed),
            Bytes(peak).to_string(),
        ]);
    }
    row.resize(COLUMNS.len(), String::new());
    row
}

fn meshes(page: &mut TextPage, meshes: &[MeshRow], not_listed: usize) {
    if meshes.is_empty() {
        return;
    }
    page.heading("Meshes, the most promising first");
    let time = |seconds: Option<f64>| seconds.map_or(String::new(), |s| Seconds(s).to_string());
    let rows: Vec<Vec<String>> = meshes
        .iter()
        .map(|row| {
            let zero = if row.zero == Zero::One { "ZeRO-1" } else { "" };
            vec![
                row.mesh.to_string(),
                row.micro_batch.to_string(),
                zero.to_owned(),
                time(row.bound_s),
                time(row.step_time_s),
                outcome(&row.outcome),
            ]
        })
        .collect();
    let columns = [
        ("mesh", Align::Left),
        ("microbatch", Align::Right),
        ("optimizer", Align::Left),
        ("bound", Align::Right),
        ("step time", Align::Right),
        ("fate", Align::Left),
    ];
    page.table(&columns, &rows);
    if not_listed > 0 {
        page.paragraph(&format!(
            "{not_listed} more, less promising by their bounds, are not listed."
        ));
    }
}

fn outcome(outcome: &ContextOutcome) -> String {
    match outcome {
        ContextOutcome::Solved(_) => "solved".into(),
        ContextOutcome::Pruned => "pruned: its bound is no better than the plan".into(),
        ContextOutcome::NotImproved => "searched: nothing faster than the plan was found".into(),
        ContextOutcome::NotReached => "not reached".into(),
        ContextOutcome::Infeasible(infeasible) => infeasible.to_string(),
    }
}
