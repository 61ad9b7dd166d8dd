//! Plans as configurations of other training frameworks.
//!
//! A framework translates every [`Decision`] of a plan into its own options, and says whether they are the
//! same, nearly the same, or missing. The match over decisions is exhaustive in each framework, so none is dropped.
//!
//! | file | contents |
//! |---|---|
//! | `decision.rs` | the decisions of a plan, and their fidelity |
//! | `exported_plan.rs` | what frameworks ask about a plan: placement of weights, recomputation, stages |
//! | `megatron.rs`, `nanotron.rs`, `torchtitan.rs` | one framework each |
//! | `render.rs` | options as shell words, YAML and TOML |

mod common;
mod decision;
mod exported_plan;
mod megatron;
mod nanotron;
mod render;
mod torchtitan;

use clap::ValueEnum;

pub use decision::{Decision, Fidelity, Translation};
pub use exported_plan::ExportedPlan;

/// A framework that plans are exported to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Framework {
    /// Megatron-LM: arguments of pretrain_gpt.py, as a file for bash
    Megatron,
    /// Nanotron, and BOOST's fork of it for low-rank models: YAML
    Nanotron,
    /// torchtitan: TOML
    Torchtitan,
}

impl Framework {
    fn target(self) -> &'static dyn TargetFramework {
        match self {
            Framework::Megatron => &megatron::Megatron,
            Framework::Nanotron => &nanotron::Nanotron,
            Framework::Torchtitan => &torchtitan::Torchtitan,
        }
    }
}

/// The options of one framework.
trait TargetFramework {
    /// Name and version, whose options are written.
    fn name(&self, plan: &ExportedPlan) -> &'static str;

    /// The options that express a decision of the plan.
    fn translate(&self, decision: Decision, plan: &ExportedPlan) -> Translation;

    /// The configuration, with these lines as comments at its head.
    fn render(&self, plan: &ExportedPlan, head: &[String], rows: &[ExportRow]) -> String;
}

/// A decision with its translation.
#[derive(Debug)]
pub struct ExportRow {
    /// The decision.
    pub decision: Decision,
    /// Value in the plan, in words.
    pub value: String,
    /// Options, and what becomes of the decision.
    pub translation: Translation,
}

/// A plan as the configuration of a framework.
#[derive(Debug)]
pub struct Export {
    /// Name and version of the framework.
    pub framework: &'static str,
    /// The configuration.
    pub text: String,
    /// Every decision of the plan.
    pub rows: Vec<ExportRow>,
}

impl Export {
    /// Translates a plan.
    pub fn new(framework: Framework, plan: &ExportedPlan) -> Export {
        let target = framework.target();
        let row = |decision: Decision| ExportRow {
            decision,
            value: decision.value(plan),
            translation: target.translate(decision, plan),
        };
        let rows: Vec<ExportRow> = Decision::ALL.into_iter().map(row).collect();
        let name = target.name(plan);
        let text = target.render(plan, &head(name, plan, &rows), &rows);
        Export { framework: name, text, rows }
    }
}

/// The lines at the head of a configuration: what it is, and what differs from the plan.
fn head(framework: &str, plan: &ExportedPlan, rows: &[ExportRow]) -> Vec<String> {
    let ExportedPlan { model, plan, .. } = plan;
    let devices = plan.mesh.devices();
    let mut lines = vec![
        format!("{} on {devices} devices of {}: {}", model.name, plan.hardware.name, plan.mesh),
        format!("Written by `narrows export` for {framework}."),
    ];
    for row in rows {
        let name = row.decision.name();
        match &row.translation.fidelity {
            Fidelity::Exact => {}
            Fidelity::Approximated(how) => lines.push(format!("approximated: {name}: {how}")),
            Fidelity::NotExpressible(why) => lines.push(format!("not expressible: {name}: {why}")),
        }
    }
    lines
}
