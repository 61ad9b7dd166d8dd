//! The report of a priced plan.

use std::ffi::OsStr;

use narrows_cost_model::{Prices, Profile, TrainingRunEstimate, simulate};
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::Model;
use narrows_plan::program::{Action, Program};
use narrows_plan::{
    Axis, BucketSplit, Bytes, CheckedProgram, Context, ContextAttention, GradReduceDtype, Kernel,
    Plan, PlanLayout, ResolvedPlan,
};
use narrows_planner::SearchReport;
use serde::Serialize;

use super::page::{Align, Cell, Page};
use super::prediction::PredictionReport;
use super::search::SearchSummary;
use super::{Report, decisions, finite_limit, step_cost, training_run};
use crate::args::Detail;
use crate::output;
use crate::plot::{
    Figure, PlotKind, block_picture, memory_picture, roofline_picture, step_time_picture,
    timeline_picture,
};
use crate::priced_plan::PricedPlan;
use crate::step_cost::StepCost;
use crate::text::{batch_phrase, count, mesh_and_zero, plural, schedule, thousands};

/// Output of `plan` and `cost`.
#[derive(Serialize)]
pub struct PlanReport<'a> {
    decisions: &'a Plan,
    prediction: PredictionReport<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    search: Option<SearchSummary>,
    /// Cost of a step, if it was minimised.
    #[serde(rename = "cost", skip_serializing_if = "Option::is_none")]
    step_cost: Option<StepCost>,
    /// The training run, if one is estimated.
    #[serde(rename = "run", skip_serializing_if = "Option::is_none")]
    training_run: Option<TrainingRunEstimate>,
    #[serde(skip)]
    model: &'a Model,
    #[serde(skip)]
    resolved: &'a ResolvedPlan,
    #[serde(skip)]
    program: &'a CheckedProgram,
    /// The file that the plan was written to.
    #[serde(skip)]
    written: Option<&'a OsStr>,
}

impl<'a> PlanReport<'a> {
    /// The report of a plan on the hardware that it names. `memory_limit` is `Bytes(u64::MAX)` without a limit.
    pub fn new(model: &'a Model, priced: &'a PricedPlan, memory_limit: Bytes) -> PlanReport<'a> {
        let memory_limit_bytes = finite_limit(memory_limit);
        let PricedPlan { plan, resolved, program, prediction } = priced;
        PlanReport {
            decisions: plan,
            prediction: PredictionReport { prediction, memory_limit_bytes },
            search: None,
            step_cost: None,
            training_run: None,
            model,
            resolved,
            program,
            written: None,
        }
    }

    /// Adds the search that found the plan.
    pub fn with_search(self, report: &SearchReport) -> PlanReport<'a> {
        PlanReport { search: Some(SearchSummary::new(report)), ..self }
    }

    /// Adds the cost of a step.
    pub fn with_step_cost(self, step_cost: Option<StepCost>) -> PlanReport<'a> {
        PlanReport { step_cost, ..self }
    }

    /// Adds the training run under the plan.
    pub fn with_training_run(self, training_run: Option<TrainingRunEstimate>) -> PlanReport<'a> {
        PlanReport { training_run, ..self }
    }

    /// Adds the file that the plan is written to.
    pub fn with_file(self, file: Option<&'a OsStr>) -> PlanReport<'a> {
        PlanReport { written: file, ..self }
    }

    /// The plan.
    pub fn plan(&self) -> &'a Plan {
        self.decisions
    }

    /// The program of the plan.
    pub fn program(&self) -> &'a CheckedProgram {
        self.program
    }

    /// Pictures of the plan: its step time by part, its memory, and the passes of its pipeline stages on the hardware
    /// of `profile`.
    pub fn figures(&self, profile: &Profile) -> Vec<Figure> {
        let PredictionReport { prediction, memory_limit_bytes } = &self.prediction;
        let title = self.title();
        let of = |what: &str| format!("{title}: {what}");
        let (name, mesh) = ("this plan", self.decisions.mesh);
        let caption = "Parts of the step, averaged over the stages; they add up to the step time.";
        let parts = step_time_picture(&of("step time by part"), &[(name, prediction)]);
        let mut figures: Vec<Figure> =
            Figure::of(PlotKind::StepTime, parts, caption).into_iter().collect();
        let memory = memory_picture(&of("memory"), self.program.program(), *memory_limit_bytes);
        let caption = "Peak memory of a device on each pipeline stage: weights, gradients, optimizer states and \
                       activations.";
        figures.extend(Figure::of(PlotKind::Memory, memory, caption));
        let prices = Prices::new(profile, self.decisions.executor, &mesh);
        let price = |kernel: &Kernel| prices.kernel_time(kernel);
        if mesh.pipeline > 1 {
            let spans = simulate(self.program, prices.streams(&price)).spans;
            let timeline = timeline_picture(&of("pipeline"), spans);
            let caption = match self.decisions.chunks() {
                1 => "Simulated passes of every microbatch; white is idle time.",
                _ => {
                    "Simulated passes of every microbatch through every model chunk, later chunks in lighter colours; \
                     white is idle time."
                }
            };
            figures.extend(Figure::of(PlotKind::Pipeline, timeline, caption));
        }
        let blocks: Vec<_> = self.resolved.stages.iter().flatten().collect();
        let Some(middle) = blocks.get(blocks.len() / 2) else { return figures };
        let (layer, context) = (middle.layer, &self.resolved.context);
        let block = of(&format!("block {layer}"));
        let graph = block_picture(&block, &middle.plan, context, &price);
        let caption = "The middle block under this plan: ops with their weights, layouts of the tensors between them, \
                       and collectives where layouts change.";
        figures.extend(Figure::of(PlotKind::Block, graph, caption));
        let roofline = of(&format!("GEMMs of block {layer}"));
        let roofline = roofline_picture(&roofline, &middle.plan, context, profile, &prices);
        let caption = "GEMMs of the forward pass of the middle block below the roof of the device: the peak, and the \
                       memory bandwidth times the arithmetic intensity.";
        figures.extend(Figure::of(PlotKind::Roofline, roofline, caption));
        figures
    }

    /// The proven statement about the plan, if a search found it.
    pub fn verdict(&self) -> Option<String> {
        self.search.as_ref().map(SearchSummary::outcome)
    }

    /// Model, devices and hardware.
    pub fn title(&self) -> String {
        let devices = plural(self.decisions.mesh.devices(), "device");
        format!("{} on {devices} of {}", self.model.name, self.decisions.hardware.name)
    }

    fn plan_fields(&self) -> Vec<(&'static str, String)> {
        let plan = self.decisions;
        let workload = &plan.workload;
        let microbatches = match workload.microbatches(&plan.mesh) {
            1 => "1 microbatch".into(),
            many => format!("{} microbatches", thousands(many)),
        };
        let crossing = match plan.crossing_layout {
            Some(layout) => format!("; crossing latents {}", layout_phrase(layout)),
            None => String::new(),
        };
        let mut fields = vec![
            ("model", self.shape()),
            (
                "step",
                format!(
                    "{}, {microbatches} of {} per replica",
                    batch_phrase(workload.global_batch, workload.sequence_length),
                    thousands(workload.micro_batch),
                ),
            ),
            ("mesh", mesh_and_zero(plan)),
        ];
        let attention = match plan.context_attention {
            ContextAttention::Exchange => None,
            ContextAttention::Gather => Some("keys and values gathered over the context axis"),
            ContextAttention::Ring => Some("keys and values rotate around the context axis"),
        };
        fields.extend(
            attention.map(|text| ("attention", format!("{text}, positions in zigzag order"))),
        );
        if plan.grad_reduce_dtype != GradReduceDtype::Fp32 {
            fields.push(("gradients", format!("reduced in {}", plan.grad_reduce_dtype.name())));
        }
        fields.extend(schedule(plan).map(|schedule| ("schedule", schedule)));
        fields.extend([
            ("overlap", overlap_text(self.program.program())),
            (
                "hidden state",
                format!("{} between blocks{crossing}", layout_phrase(plan.hidden_layout)),
            ),
            ("executor", plan.executor.name().into()),
            ("recompute", self.recomputed()),
        ]);
        fields
    }

    /// Largest number of activations that a block recomputes in its backward pass.
    fn recomputed(&self) -> String {
        let blocks = self.decisions.blocks.values();
        match blocks.map(|block| block.recompute.len()).max().unwrap_or(0) {
            0 => "none".into(),
            1 => "1 activation of a block".into(),
            most => format!("up to {most} activations of a block"),
        }
    }

    /// Parameters, blocks, width and ranks of the model.
    fn shape(&self) -> String {
        let model = self.model;
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

    /// Payloads of the collectives of a middle block.
    fn collectives(&self, page: &mut Page) {
        let bytes = &self.prediction.prediction.block_collective_bytes;
        let passes = [
            ("forward", &bytes.forward),
            ("backward", &bytes.backward),
            ("recompute", &bytes.recompute),
        ];
        let cell = |bytes: Bytes| match bytes {
            Bytes(0) => Cell::from(String::new()),
            _ => bytes.into(),
        };
        // Ring attention alone has shifts.
        let has_shifts = passes.iter().any(|(_, bytes)| bytes.of(CollectiveKind::Shift) > Bytes(0));
        let kinds = CollectiveKind::ALL.into_iter();
        let kinds = kinds.filter(|kind| has_shifts || *kind != CollectiveKind::Shift);
        let rows: Vec<Vec<Cell>> = passes
            .iter()
            .filter(|(_, bytes)| !bytes.is_empty())
            .map(|(pass, payloads)| {
                let bytes = kinds.clone().map(|kind| payloads.of(kind));
                let cells = bytes.chain([payloads.statistics]).map(cell);
                std::iter::once(pass.to_string().into()).chain(cells).collect()
            })
            .collect();
        if rows.is_empty() {
            return;
        }
        page.heading("Collective payload of a middle block, per microbatch");
        let mut titles: Vec<String> = kinds.map(|kind| kind.name().replace('_', "-")).collect();
        titles.push("statistics".to_owned());
        let columns = titles.iter().map(|title| (title.as_str(), Align::Right));
        let columns: Vec<_> = std::iter::once(("pass", Align::Left)).chain(columns).collect();
        page.table(&columns, &rows);
    }
}

impl Report for PlanReport<'_> {
    fn reason_without_picture(&self, kind: PlotKind) -> Option<String> {
        let is_single = kind == PlotKind::Pipeline && self.decisions.mesh.pipeline == 1;
        is_single.then(|| "because the plan has one pipeline stage".into())
    }

    fn summary(&self) -> String {
        let prediction = self.prediction.summary();
        let search = self.search.as_ref();
        let search =
            search.map_or(String::new(), |search| format!(" Search: {}.", search.outcome()));
        format!("{prediction}{search}")
    }

    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        page.heading(self.title());
        let mut fields = self.prediction.fields();
        if let Some(cost) = &self.step_cost {
            fields.push(("cost".into(), step_cost::phrase(cost)));
            fields.push(("devices".into(), step_cost::devices_phrase(cost)));
        }
        if let Some(search) = &self.search {
            fields.push(("search".into(), search.verdict()));
        }
        page.fields(&fields);
        if let Some(run) = &self.training_run {
            training_run::section(&mut page, run);
        }
        page.heading("Plan");
        page.fields(&self.plan_fields());
        self.prediction.breakdown(&mut page);
        self.prediction.uncertainty(&mut page, detail);
        decisions::tables(&mut page, self.decisions, self.resolved, detail);
        self.collectives(&mut page);
        if let Some(search) = &self.search {
            page.heading("Search");
            page.line(search.effort());
        }
        match self.written {
            Some(file) if !output::is_stdout(file) => {
                page.heading(format!("Plan written to {}", file.to_string_lossy()));
            }
            _ => {}
        }
        page
    }
}

fn layout_phrase(layout: PlanLayout) -> &'static str {
    match layout {
        PlanLayout::Replicated => "replicated",
        PlanLayout::Feature => "sharded on features",
        PlanLayout::Sequence => "sharded on sequences",
        PlanLayout::Position => "sharded on positions",
    }
}

/// The collectives that overlap with computation, in words.
fn overlap_text(program: &Program) -> String {
    let in_first_pass = program.stages.iter().any(|stage| !stage.gather_buckets.is_empty());
    let weights = "weights are gathered during the first forward pass".to_string();
    let mut texts: Vec<String> = beside_later_passes(program).into_iter().collect();
    texts.extend(in_first_pass.then_some(weights));
    texts.extend(split_buckets_text(&program.context));
    if texts.is_empty() { "none".into() } else { texts.join("; ") }
}

/// The buckets of first blocks, in words; `None` where they are whole.
fn split_buckets_text(context: &Context) -> Option<String> {
    let text = |split: BucketSplit| match split {
        BucketSplit::Whole => None,
        BucketSplit::AtAttention => Some("split at attention"),
        BucketSplit::ByLinear => Some("split by linear"),
    };
    let gradients =
        text(context.last_gradient_bucket).filter(|_| context.can_split_gradient_bucket());
    let weights = text(context.first_gather_bucket).filter(|_| context.gathers_in_forward());
    Some(match (gradients, weights) {
        (None, None) => return None,
        (Some(gradients), None) => format!("gradients of the first block {gradients}"),
        (None, Some(weights)) => format!("weights of the first block {weights}"),
        (Some(gradients), Some(weights)) if gradients == weights => {
            format!("gradients and weights of the first block {gradients}")
        }
        (Some(gradients), Some(weights)) => {
            format!("gradients of the first block {gradients}, its weights {weights}")
        }
    })
}

/// The collectives that overlap with computation other than gathers of updated weights, in words; `None` without any.
fn beside_later_passes(program: &Program) -> Option<String> {
    let beside = |is_axis: fn(Axis) -> bool| {
        program.instructions().any(|instr| {
            let is_on_axis = matches!(&instr.action, Action::Collective(c) if is_axis(c.axis));
            is_on_axis && instr.overlapped_instrs > 0
        })
    };
    let in_last_pass = program.stages.iter().any(|stage| !stage.gradient_buckets.is_empty());
    let axis = program.context.activation_axis().name();
    let in_pairs = program.context.overlap_microbatch_pairs;
    let pairs = if in_pairs { " in pairs of microbatches" } else { "" };
    let activations = format!("{axis}-axis collectives{pairs}");
    let of_data = beside(|axis| axis == Axis::Data);
    Some(match (of_data, in_last_pass, beside(Axis::shards_activations)) {
        (true, _, true) => format!("data-axis and {activations}"),
        (true, _, false) if program.context.shards_weights() => {
            "weights are gathered and gradients reduced during the passes".into()
        }
        (true, _, false) => "gradients are reduced during the backward passes".into(),
        (false, true, true) => format!("gradient reductions and {activations}"),
        (false, true, false) => "gradients are reduced during the last backward pass".into(),
        (false, false, true) if in_pairs => format!("{axis}-axis collectives{pairs}"),
        (false, false, true) => format!("{activations} overlapped with weight-gradient GEMMs"),
        (false, false, false) => return None,
    })
}
