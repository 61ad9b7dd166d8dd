//! Measurements of training steps from rows in JSON, as people publish throughput.
//!
//! ```json
//! {"rows": [{"source": "…", "framework": "torchtitan FSDP2 eager", "family": "torchtitan", "device": "A100-80GB",
//!   "model": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "d_ff": 14336, "gated": true,
//!             "vocab": 128256, "tied": false},
//!   "devices": 64, "tensor": 1, "pipeline": 1, "data": 64, "sharding": "FULL_SHARD", "micro_batch": 1,
//!   "global_batch": 64, "sequence": 8192, "dtype": "bf16", "recompute": "block", "step_s": 2.8}]}
//! ```
//! Other fields are ignored. One of `step_s` and `tokens_per_s` may be left out; otherwise they agree. The family chooses
//! the prices: a table of `profiles/frameworks`, or with `plan` those of a plan, whose model is `{"preset": …}` or
//! `{"described": {…}}`. A row states what a step of a measurements file states, by the keys of such a step where it has
//! no key of its own.

mod row;

use indexmap::IndexMap;
use narrows_cost_model::Executor;
use narrows_plan::strategy::Baseline;
use narrows_plan::{Defect, Defects, Seconds, Workload, Zero, json, short_number};

use crate::measurements::{
    Citation, DecoderModel, EmbeddingKind, GptModel, MeasuredQuantity, Measurement,
    MeasurementUnit, MeasurementsFile, MeasurementsFormat, MlpKind, StepRecompute, TrainedModel,
    TrainingStep, validate,
};
use row::{DecoderSizes, PublishedRow, RowModel, RowsFile};

/// Devices of rows, and the preset of each: eight a node.
const DEVICES: [(&str, &str); 4] = [
    ("A100-40GB", "a100-40gb"),
    ("A100-80GB", "a100-80gb-8"),
    ("H100-80GB", "h100-sxm"),
    ("H200-141GB", "h200-sxm"),
];
/// Number formats of 16 bits.
const DTYPES: [&str; 4] = ["bf16", "amp_bf16", "fp16", "amp_fp16"];
/// Difference between a step time and a throughput that rounding explains.
const ROUNDING_MAX: f64 = 0.05;
/// The family of rows of a model with a plan.
const PLANNED: &str = "plan";
const FAMILIES: &str = "mpt, nanotron, torchtitan, megatron, plan";
const RECOMPUTATIONS: &str = "none, block, selective layer, selective op, selective, \
    selective + sequence parallel; of a plan auto, none, latents, block";
const SHARDINGS: &str = "none, ZeRO-1, SHARD_GRAD_OP, FULL_SHARD";

/// Reads rows in JSON. `name` becomes the name of the measurements; `hardware` replaces the preset of every row's device.
///
/// # Errors
/// A syntax error or a missing field; else every value without a price, and the defects of the measurements, with their
/// rows.
pub fn measurements_from_rows(
    text: &str,
    name: &str,
    hardware: Option<&str>,
) -> Result<MeasurementsFile, Defects> {
    let file: RowsFile = json::read(text).map_err(|defect| {
        defect.hint("a file of rows, as docs/measurements-format.md describes")
    })?;
    if file.rows.is_empty() {
        return Err(Defect::new("rows", "is empty").into());
    }
    let mut defects = Defects::default();
    let mut sources: IndexMap<String, Citation> = IndexMap::new();
    let mut measurements = vec![];
    for (index, row) in file.rows.iter().enumerate() {
        let mut reader = RowReader { index, row, defects: &mut defects };
        let step = reader.step();
        let value = reader.time_s();
        let hardware = hardware.map_or_else(|| reader.hardware(), str::to_owned);
        let citation = Citation { citation: row.source.clone(), conditions: row.framework.clone() };
        let key = source_key(&mut sources, &row.family, citation);
        measurements.push(Measurement {
            name: row.name(index),
            table: format!("{} on {}", row.family, row.device),
            source: key,
            hardware,
            executor: row.executor.unwrap_or(Executor::Eager),
            mesh: row.mesh(),
            measured: MeasuredQuantity::Step(Box::new(step)),
            value,
            unit: MeasurementUnit::S,
            comparison_group: row.comparison_group(&file.rows),
            fitted: row.fitted,
        });
    }
    defects.into_result(())?;
    let (format, name, description) = (MeasurementsFormat::V1, name.to_owned(), file.about);
    let file = MeasurementsFile { format, name, description, sources, measurements };
    validate(&file, |index| format!("rows[{index}], "))?;
    Ok(file)
}

/// The key of a source, which is added where it is new: the family with a number.
fn source_key(
    sources: &mut IndexMap<String, Citation>,
    family: &str,
    citation: Citation,
) -> String {
    if let Some((key, _)) = sources.iter().find(|(_, known)| **known == citation) {
        return key.clone();
    }
    let key = format!("{family}-{}", sources.len() + 1);
    sources.insert(key.clone(), citation);
    key
}

/// Reads one row and reports its defects.
struct RowReader<'a> {
    index: usize,
    row: &'a PublishedRow,
    defects: &'a mut Defects,
}

impl RowReader<'_> {
    fn defect(&mut self, field: &str, problem: String, hint: &str) {
        let defect = Defect::new(format!("rows[{}].{field}", self.index), problem);
        self.defects.push(if hint.is_empty() { defect } else { defect.hint(hint) });
    }

    fn hardware(&mut self) -> String {
        let device = self.row.device.as_str();
        if let Some((_, preset)) = DEVICES.iter().find(|(name, _)| *name == device) {
            return (*preset).to_owned();
        }
        let names = DEVICES.map(|(name, _)| name).join(", ");
        let problem = format!("no preset is known for `{device}`");
        self.defect("device", problem, &format!("{names}; or `--hardware NAME`"));
        String::new()
    }

    fn time_s(&mut self) -> f64 {
        let row = self.row;
        let earlier_defects = self.defects.0.len();
        for (field, size) in [("global_batch", row.global_batch), ("sequence", row.sequence)] {
            if size == 0 {
                self.defect(field, "0 is not a positive number".into(), "");
            }
        }
        if let Some(throughput) = row.tokens_per_s.filter(|value| *value <= 0.0) {
            let problem = format!("{} is not positive", short_number(throughput));
            self.defect("tokens_per_s", problem, "tokens per second of all devices");
        }
        if self.defects.0.len() > earlier_defects {
            return 1.0;
        }
        let tokens = row.global_batch as f64 * row.sequence as f64;
        match (row.step_s, row.tokens_per_s) {
            (Some(time_s), Some(tokens_per_s)) => {
                let of_throughput = tokens / tokens_per_s;
                let agree = (time_s / of_throughput - 1.0).abs() <= ROUNDING_MAX;
                if !agree {
                    let problem = format!(
                        "{} contradicts `tokens_per_s`: at {} tokens per second of all devices, {} × {} tokens take {}",
                        short_number(time_s),
                        short_number(tokens_per_s),
                        row.global_batch,
                        row.sequence,
                        Seconds(of_throughput)
                    );
                    self.defect("step_s", problem, "one of the two, or both of the same step");
                }
                time_s
            }
            (Some(time_s), None) => time_s,
            (None, Some(tokens_per_s)) => tokens / tokens_per_s,
            (None, None) => {
                self.defect("step_s", "is missing".into(), "step_s, or tokens_per_s");
                1.0
            }
        }
    }

    fn step(&mut self) -> TrainingStep {
        let row = self.row;
        let axes = [row.tensor, row.context, row.pipeline, row.data].map(u128::from);
        // Four factors of 64 bits may exceed 128 bits.
        let devices = axes.into_iter().fold(1_u128, u128::saturating_mul);
        if devices != u128::from(row.devices) {
            let problem = format!("{} is not tensor × pipeline × data × context", row.devices);
            self.defect(
                "devices",
                problem,
                "the product of the axes, of which `context` is 1 by default",
            );
        }
        self.dtype();
        let (recompute, is_sequence_parallel) = self.recompute();
        let (model, framework) = self.model();
        let strategy = self.strategy(&model, is_sequence_parallel);
        TrainingStep {
            model,
            workload: Workload {
                global_batch: row.global_batch,
                sequence_length: row.sequence,
                micro_batch: row.micro_batch,
            },
            strategy,
            recompute,
            framework,
            interleaving: row.interleaving,
            norm: row.norm,
            weights: row.weights,
            zero: self.zero(),
            overlap_tensor_collectives: row.overlap_tensor_collectives,
            linears: row.linears,
            accumulate_grad_in_fp32: row.accumulate_grad_in_fp32,
        }
    }

    /// Checks the number format. Tables of frameworks are of 16 bits; a plan has that of training on the hardware.
    fn dtype(&mut self) {
        match self.row.dtype.as_deref() {
            Some(dtype) if DTYPES.contains(&dtype) => {}
            Some(dtype) => {
                let problem = format!("`{dtype}` is not a format of 16 bits");
                self.defect("dtype", problem, &DTYPES.join(", "));
            }
            None if self.row.family == PLANNED => {}
            None => self.defect("dtype", "is missing".into(), &DTYPES.join(", ")),
        }
    }

    /// The stated strategy. Without one, Megatron-LM shards tokens where the row states sequence parallelism; other
    /// frameworks shard them wherever they have a tensor axis.
    fn strategy(&mut self, model: &TrainedModel, is_sequence_parallel: bool) -> Baseline {
        let shards_tokens = match model {
            TrainedModel::Gpt(_) => is_sequence_parallel,
            _ => is_sequence_parallel || self.row.tensor > 1,
        };
        match self.row.strategy {
            None if self.row.family == PLANNED => {
                let names = Baseline::ALL.map(Baseline::name).join(", ");
                let problem = "is missing: a plan is restricted to the sharding that was measured";
                self.defect("strategy", problem.into(), &names);
                Baseline::Auto
            }
            None => Baseline::of_dense_model(shards_tokens),
            Some(strategy) => {
                if is_sequence_parallel && !strategy.shards_tokens() {
                    let problem = format!(
                        "`{}` contradicts `recompute`, which states sequence parallelism",
                        strategy.name()
                    );
                    let sharding = Baseline::of_dense_model(true).name();
                    self.defect("strategy", problem, &format!("{sharding}, or omit `strategy`"));
                }
                strategy
            }
        }
    }

    /// Recomputation, and whether the row states sequence parallelism.
    fn recompute(&mut self) -> (StepRecompute, bool) {
        match self.row.recompute.as_str() {
            "auto" => (StepRecompute::Auto, false),
            "none" => (StepRecompute::None, false),
            "latents" => (StepRecompute::Latents, false),
            "block" | "full" => (StepRecompute::Block, false),
            "selective layer" => (StepRecompute::SelectiveLayers, false),
            "selective op" => (StepRecompute::SelectiveOps, false),
            "selective" => (StepRecompute::Selective, false),
            "selective + sequence parallel" => (StepRecompute::Selective, true),
            other => {
                let problem = format!("`{other}` is not a known recomputation");
                self.defect("recompute", problem, RECOMPUTATIONS);
                (StepRecompute::None, false)
            }
        }
    }

    fn zero(&mut self) -> Zero {
        match self.row.sharding.as_str() {
            "none" => Zero::Off,
            "ZeRO-1" => Zero::One,
            "SHARD_GRAD_OP" | "ZeRO-2" => Zero::Two,
            "FULL_SHARD" | "ZeRO-3" => Zero::Three,
            other => {
                self.defect("sharding", format!("`{other}` is not a known sharding"), SHARDINGS);
                Zero::Off
            }
        }
    }

    /// The model, and the framework's table.
    fn model(&mut self) -> (TrainedModel, Option<String>) {
        let family = self.row.family.as_str();
        match &self.row.model {
            RowModel::Planned(model) => {
                if family != PLANNED {
                    let problem =
                        format!("has a plan, and `{family}` rows are priced by their sizes");
                    self.defect("model", problem, "family `plan`, or `layers`, `hidden` and so on");
                }
                (model.clone(), None)
            }
            RowModel::Decoder(sizes) => self.decoder(sizes),
        }
    }

    /// A decoder under the framework of its family.
    fn decoder(&mut self, sizes: &DecoderSizes) -> (TrainedModel, Option<String>) {
        let DecoderSizes { layers, hidden, heads, kv_heads, d_ff, gated, vocab, tied } = *sizes;
        let decoder = |framework: &str| {
            let mlp = if gated { MlpKind::Gated } else { MlpKind::Plain };
            let embedding = if tied { EmbeddingKind::Tied } else { EmbeddingKind::Untied };
            let model = DecoderModel {
                layers,
                hidden,
                heads,
                kv_heads,
                d_ff,
                mlp,
                vocabulary: vocab,
                embedding,
            };
            (TrainedModel::Decoder(model), Some(framework.to_owned()))
        };
        let framework = self.row.framework.to_ascii_lowercase();
        let compiled = framework.contains("compile");
        match self.row.family.as_str() {
            "mpt" => decoder("fsdp"),
            "nanotron" => decoder("nanotron"),
            "torchtitan" if compiled => decoder("torchtitan-compiled"),
            "torchtitan" => decoder("torchtitan"),
            "megatron" => {
                if gated || kv_heads != heads || Some(d_ff) != hidden.checked_mul(4) {
                    let problem = "a Megatron-LM row is priced with a plain MLP of width 4h and as many key as query heads";
                    self.defect("model", problem.into(), "a row of such a GPT");
                }
                if !tied {
                    let problem = "a Megatron-LM row is priced with a tied embedding";
                    self.defect("model.tied", problem.into(), "true");
                }
                let gpt = GptModel { layers, hidden, heads, vocabulary: vocab };
                let deepspeed = framework.contains("deepspeed");
                let table = if deepspeed { "megatron-deepspeed" } else { "megatron" };
                (TrainedModel::Gpt(gpt), Some(table.to_owned()))
            }
            PLANNED => {
                let problem = "has sizes alone, and a `plan` row needs a whole model";
                let hint = "{\"preset\": NAME}, or {\"described\": {…}} with a model file";
                self.defect("model", problem.into(), hint);
                decoder("fsdp")
            }
            other => {
                self.defect("family", format!("`{other}` has no prices"), FAMILIES);
                decoder("fsdp")
            }
        }
    }
}
