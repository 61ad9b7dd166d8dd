//! Reports for people.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use narrows_plan::decisions::PlanLayout;
use narrows_plan::strategy::Zero;
use narrows_plan::{Bytes, Seconds};
use narrows_planner::{ContextOutcome, SearchReport, SearchStatus};
use narrows_runtime::TimeCategory;

use super::page::{Align, TextPage, count, percent, plural, thousands};
use super::{PlanReport, decisions, limited, parts, unmeasured};
use crate::args::low::executor_name;
use crate::output;

/// A priced plan, and where it was written.
pub fn found(findings: &PlanReport, written: Option<&OsStr>) -> String {
    let mut page = TextPage::default();
    subject(&mut page, findings);
    price(&mut page, findings);
    decisions::tables(&mut page, findings.plan, findings.resolved);
    volumes(&mut page, findings);
    if let Some(search) = findings.search {
        page.heading("Search");
        page.line(how_it_went(search));
    }
    match written {
        Some(file) if !output::is_stdout(file) => {
            page.heading(format!("The plan is in {}", file.to_string_lossy()));
        }
        _ => {}
    }
    page.finish()
}

fn subject(page: &mut TextPage, findings: &PlanReport) {
    let PlanReport { model, profile, plan, .. } = findings;
    let devices = plural(plan.mesh.devices(), "device");
    page.heading(format!("{} on {devices} of {}", model.name, profile.name()));
    let crossing = match plan.crossing_layout {
        Some(layout) => format!(", crossing latents {}", lies(layout)),
        None => String::new(),
    };
    let workload = &plan.workload;
    let microbatches = workload.microbatches(&plan.mesh);
    let zero = match plan.zero {
        Zero::Off => "",
        Zero::One => ", ZeRO-1",
    };
    page.fields(&[
        ("model", shape(findings)),
        (
            "step",
            format!(
                "{} of {} tokens, {} of {} a replica",
                plural(workload.global_batch, "sequence"),
                thousands(workload.sequence_length),
                match microbatches {
                    1 => "1 microbatch".into(),
                    many => format!("{} microbatches", thousands(many)),
                },
                plural(workload.micro_batch, "sequence"),
            ),
        ),
        ("mesh", format!("{}{zero}", plan.mesh)),
        ("hidden state", format!("{} between blocks{crossing}", lies(plan.hidden_layout))),
        ("executor", executor_name(findings.executor).into()),
    ]);
}

fn lies(layout: PlanLayout) -> &'static str {
    match layout {
        PlanLayout::Replicated => "whole on every device",
        PlanLayout::Feature => "sharded on features",
        PlanLayout::Sequence => "sharded on sequences",
        PlanLayout::Position => "sharded on positions",
    }
}

fn shape(findings: &PlanReport) -> String {
    let model = findings.model;
    let mut ranks: Vec<u64> = model
        .blocks
        .iter()
        .flat_map(|block| block.linears())
        .filter_map(|(_, linear)| linear.rank())
        .collect();
    ranks.sort_unstable();
    let rank = match (ranks.first(), ranks.last()) {
        (Some(low), Some(high)) if low == high => format!(", rank {low}"),
        (Some(low), Some(high)) => format!(", ranks {low} to {high}"),
        _ => ", dense".into(),
    };
    let blocks = plural(model.blocks.len() as u64, "block");
    let parameters = count(model.parameters());
    format!("{parameters} parameters, {blocks} of width {}{rank}", model.hidden)
}

fn price(page: &mut TextPage, findings: &PlanReport) {
    let prediction = findings.prediction;
    let [low, high] = prediction.step_time_interval_s.map(Seconds);
    let step_time = Seconds(prediction.step_time_s);
    page.heading("Prediction");
    let mut fields = vec![
        ("step time", format!("{step_time} (90 % between {low} and {high})")),
        ("throughput", format!("{} tokens/s", thousands(prediction.tokens_per_s.round() as u64))),
        ("MFU", percent(prediction.mfu)),
    ];
    let limit = limited(findings.memory_limit);
    let stages = &prediction.peak_memory_bytes;
    let names: Vec<String> = match stages.len() {
        1 => vec!["memory".into()],
        many => (0..many).map(|stage| format!("memory of stage {stage}")).collect(),
    };
    for (name, bytes) in names.iter().zip(stages) {
        fields.push((name, memory(Bytes(*bytes), limit)));
    }
    page.fields(&fields);
    breakdown(page, findings);
    if !prediction.assumed.is_empty() {
        let assumed = prediction.assumed.join(", ");
        page.paragraph(&format!("Not measured on this hardware: {assumed}"));
    }
    unmeasured::tell(page, prediction);
}

fn memory(peak: Bytes, limit: Option<Bytes>) -> String {
    match limit {
        None => format!("{peak} a device, no limit"),
        Some(limit) if peak > limit => format!("{peak} a device: over the limit of {limit}"),
        Some(limit) => {
            let share = percent(peak.as_f64() / limit.as_f64());
            format!("{peak} a device of {limit} ({share})")
        }
    }
}

fn breakdown(page: &mut TextPage, findings: &PlanReport) {
    let breakdown = &findings.prediction.breakdown_s;
    let named =
        TimeCategory::ALL.map(|part| (parts::title(part), parts::predicted(breakdown, part)));
    let step_time = findings.prediction.step_time_s;
    let rows: Vec<Vec<String>> = named
        .iter()
        .filter(|(_, time)| *time > 0.0)
        .map(|(name, time)| {
            vec![name.to_string(), Seconds(*time).to_string(), percent(time / step_time)]
        })
        .collect();
    page.heading("Where the time goes");
    page.table(&[("part", Align::Left), ("time", Align::Right), ("share", Align::Right)], &rows);
}

/// The collectives of a middle block.
fn volumes(page: &mut TextPage, findings: &PlanReport) {
    let volumes = &findings.prediction.block_collective_bytes;
    let passes =
        [("forward", &volumes.forward), ("backward", &volumes.backward), ("redo", &volumes.redo)];
    let payload = |bytes: &BTreeMap<&'static str, u64>, kind: &str| {
        bytes.get(kind).map(|bytes| Bytes(*bytes).to_string()).unwrap_or_default()
    };
    let kinds = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "statistics"];
    let rows: Vec<Vec<String>> = passes
        .iter()
        .filter(|(_, bytes)| !bytes.is_empty())
        .map(|(pass, bytes)| {
            let cells = kinds.iter().map(|kind| payload(bytes, kind));
            std::iter::once(pass.to_string()).chain(cells).collect()
        })
        .collect();
    if rows.is_empty() {
        return;
    }
    page.heading("Collective payload of a middle block, one microbatch");
    let columns = std::iter::once(("pass", Align::Left));
    let columns: Vec<_> = columns.chain(kinds.map(|kind| (kind, Align::Right))).collect();
    page.table(&columns, &rows);
}

/// One line about a search.
pub fn how_it_went(search: &SearchReport) -> String {
    let found =
        search.contexts.iter().any(|context| matches!(context.outcome, ContextOutcome::Solved(_)));
    let SearchReport { candidates_priced: priced, candidates_pruned: pruned, .. } = search;
    let ended = match search.status {
        SearchStatus::Optimal => "proven the fastest of the space".to_owned(),
        SearchStatus::GapLimit if !found => "no plan was found that fits".to_owned(),
        SearchStatus::GapLimit => {
            format!("no plan is more than {} faster", percent(search.gap))
        }
        SearchStatus::TimeLimit if !found => "time ran out; no plan was found".to_owned(),
        SearchStatus::TimeLimit => {
            format!("time ran out; no plan is more than {} faster", percent(search.gap))
        }
        SearchStatus::Infeasible => "no plan exists".to_owned(),
    };
    let time = Seconds(search.wall_time.as_secs_f64());
    format!(
        "{}: {ended}; {} candidates priced, {} pruned, in {time}",
        search.status.name(),
        thousands(*priced),
        thousands(*pruned),
    )
}
