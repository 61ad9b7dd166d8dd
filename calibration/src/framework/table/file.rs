//! The JSON form of a framework's table, `narrows-framework/1`.
//!
//! A table states what a framework launches for a decoder: its attention kernel, the passes over memory of each
//! segment, the host's time, and what it communicates for sharded parameters. It has no value that is indexed by a
//! model, a mesh or a device.

use narrows_cost_model::Profile;
use narrows_cost_model::interval::prediction_interval;
use narrows_cost_model::profile::{Provenance, RelativeError, preset};
use narrows_plan::{DType, Defect, Defects, Zero, json};
use narrows_profiles::FRAMEWORKS;
use serde::{Deserialize, Serialize};

/// Largest factor, fraction or time of a table.
const VALUE_MAX: f64 = 1e3;

/// Most launches of one entry.
const LAUNCHES_MAX: u64 = 1000;
/// Most bytes of an element in one launch.
const BYTES_MAX: u64 = 1000;

/// The table of a framework.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FrameworkTable {
    /// Version of the format.
    pub format: TableFormat,
    /// The name in measurements files.
    pub name: String,
    /// One or two sentences for a reader.
    pub description: String,
    /// GEMMs of linears that share an input.
    pub linears: LinearGrouping,
    /// The attention kernel.
    pub attention: AttentionKernel,
    /// Passes over memory.
    pub passes: SegmentPasses,
    /// Recomputation of whole blocks.
    pub block_recomputation: BlockRecomputation,
    /// Time of the host.
    pub host: HostCosts,
    /// Tokens of the residual stream over the tensor axis, unless a step states it.
    pub tokens: TokenSharding,
    /// Communication and updates of parameters.
    pub parameters: ParameterCosts,
    /// Division of blocks among pipeline stages.
    pub stages: StageDivision,
    /// Factors on the prices of the profile, for everything that scales with them and is not counted.
    pub factors: PriceFactors,
    /// Errors of measured steps.
    pub errors: StepErrors,
    /// Provenance of the values.
    pub provenance: Provenance,
}

/// Version of the format of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TableFormat {
    /// The only version so far.
    #[serde(rename = "narrows-framework/1")]
    V1,
}

/// GEMMs of linears that share an input: q, k and v; gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LinearGrouping {
    /// One GEMM for all of them.
    Grouped,
    /// One GEMM each.
    Separate,
}

/// Recomputation of whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BlockRecomputation {
    /// Until the last saved tensor: the last linear and what follows it are not repeated.
    UntilLastSaved,
    /// The whole forward pass.
    Whole,
}

/// The attention kernel, relative to the curves of the profile, which are those of FlashAttention-2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AttentionKernel {
    /// Name and generation, for a reader.
    pub kernel: String,
    /// Efficiency of the forward pass over that of the profile.
    pub forward: f64,
    /// Efficiency of the backward pass over that of the profile.
    pub backward: f64,
}

/// Passes over memory of each segment and direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SegmentPasses {
    /// A block, forward.
    pub block_forward: Vec<MemoryPass>,
    /// A block, backward.
    pub block_backward: Vec<MemoryPass>,
    /// The embedding, forward.
    pub embedding_forward: Vec<MemoryPass>,
    /// The embedding, backward.
    pub embedding_backward: Vec<MemoryPass>,
    /// Last norm, logits and loss, forward.
    pub head_forward: Vec<MemoryPass>,
    /// The same, backward.
    pub head_backward: Vec<MemoryPass>,
}

/// Launches that read and write memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryPass {
    /// The tensor whose elements are counted.
    pub of: PassTensor,
    /// Bytes read and written for each element by one launch.
    #[serde(rename = "bytes")]
    pub bytes_per_element: u64,
    /// Launches.
    #[serde(default = "one")]
    pub times: u64,
    /// The models that have this pass.
    #[serde(default)]
    pub only: ModelKind,
}

fn one() -> u64 {
    1
}

/// The tensor that a pass reads and writes, on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PassTensor {
    /// The residual stream.
    Hidden,
    /// Queries, or the context.
    Queries,
    /// Keys, or values.
    Keys,
    /// An inner tensor of the MLP.
    Mlp,
    /// Logits.
    Logits,
    /// The weights of the segment.
    Weights,
}

/// The models that have a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ModelKind {
    /// All models.
    #[default]
    All,
    /// Models whose MLP has a gate.
    Gated,
    /// Models whose MLP has no gate.
    Plain,
}

/// Time of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostCosts {
    /// Seconds to launch one kernel.
    pub operator_s: f64,
    /// Seconds of modules and hooks of a block, for each pass.
    pub block_s: f64,
    /// Seconds of a step outside its passes.
    pub step_s: f64,
}

/// Tokens of the residual stream over the tensor axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TokenSharding {
    /// Every device has all of them.
    Replicated,
    /// Sequence parallelism.
    Sharded,
}

impl TokenSharding {
    /// Whether a device has a share of the tokens.
    pub fn are_sharded(self) -> bool {
        self == TokenSharding::Sharded
    }
}

/// Communication and updates of parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ParameterCosts {
    /// The ZeRO stage, unless a step states one.
    pub zero: Zero,
    /// Bytes of a gathered weight.
    pub weight_bytes: u64,
    /// Bytes of a reduced gradient.
    pub gradient_bytes: u64,
    /// Bytes that an update reads and writes for each of its parameters.
    pub update_bytes: u64,
    /// Computation beside which these collectives run.
    pub overlap: ParameterOverlap,
}

/// Computation beside which collectives of parameters run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ParameterOverlap {
    /// The pass of a neighbouring block.
    Blocks,
    /// Nothing.
    None,
}

/// Division of blocks among pipeline stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StageDivision {
    /// Equal numbers of blocks.
    EqualBlocks,
    /// Nearly equal numbers of weights, those of the logits included.
    EqualWeights,
}

/// Factors on the prices of the profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PriceFactors {
    /// Factor on GEMMs: sustained clocks under power limits, below those of short measurements.
    pub gemm: f64,
    /// Factor on GEMMs with rows that do not begin at multiples of 16 bytes, for which libraries have slower kernels.
    pub unaligned_gemm: f64,
    /// Factor on passes over memory.
    pub memory: f64,
    /// Factor on collectives and transfers.
    pub collective: f64,
}

/// Errors of measured steps, ln(measured / predicted).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StepErrors {
    /// Hardware profiles of the steps that the values were fitted to.
    pub fitted_hardware: Vec<String>,
    /// Errors on this hardware, with each model left out of the fit in turn.
    pub models_left_out: RelativeError,
    /// Errors on other hardware, with each kind of hardware left out of the fit in turn.
    pub hardware_left_out: RelativeError,
}

impl StepErrors {
    /// The errors of steps on this hardware, and their 90 % interval as ratios to the prediction. Hardware of the fit is a
    /// profile that equals its preset, not only in name.
    pub fn of(&self, profile: &Profile) -> (&RelativeError, [f64; 2]) {
        let is_fitted = |name: &String| {
            preset(name).is_ok_and(|fitted| fitted.fingerprint() == profile.fingerprint())
        };
        let fitted = self.fitted_hardware.iter().any(is_fitted);
        let error = if fitted { &self.models_left_out } else { &self.hardware_left_out };
        if error.residuals.is_empty() {
            return (error, [1.0 / (1.0 + error.half_width_90), 1.0 + error.half_width_90]);
        }
        (error, prediction_interval(&[], &error.residuals, 1.0).map(f64::exp))
    }
}

impl FrameworkTable {
    /// Whether pipeline stages have equal numbers of blocks.
    pub fn divides_blocks(&self) -> bool {
        self.stages == StageDivision::EqualBlocks
    }

    /// Checks that the hardware computes in 16 bits, which all tables assume.
    ///
    /// # Errors
    /// Other hardware.
    pub fn check_precision(&self, profile: &Profile) -> Result<(), Defect> {
        if profile.precision().compute_dtype() == DType::Bf16 {
            return Ok(());
        }
        let problem = format!(
            "`{}` is priced in 16 bits, and `{}` computes in 32",
            self.name,
            profile.name()
        );
        Err(Defect::new("hardware", problem).hint("hardware of `mixed-bf16`"))
    }

    /// Reads and validates a table; `name` is its name in messages.
    ///
    /// # Errors
    /// A syntax error or an unknown field, else every value outside its range.
    pub fn read(name: &str, text: &str) -> Result<FrameworkTable, Defects> {
        let table: FrameworkTable = json::read(text).map_err(|defect| {
            let problem = format!("{name} is not the table of a framework: {}", defect.problem);
            Defects::single(Defect::new(defect.field, problem))
        })?;
        let mut defects = Defects::default();
        for (field, value) in [
            ("attention.forward", table.attention.forward),
            ("attention.backward", table.attention.backward),
            ("factors.gemm", table.factors.gemm),
            ("factors.unaligned_gemm", table.factors.unaligned_gemm),
            ("factors.memory", table.factors.memory),
            ("factors.collective", table.factors.collective),
        ] {
            if !(value > 0.0 && value <= VALUE_MAX) {
                defects.push(Defect::new(field, format!("{value} is not a positive factor")));
            }
        }
        for (field, value) in [
            ("host.operator_s", table.host.operator_s),
            ("host.block_s", table.host.block_s),
            ("host.step_s", table.host.step_s),
        ] {
            if !(0.0..=VALUE_MAX).contains(&value) {
                defects.push(Defect::new(field, format!("{value} is not a time in seconds")));
            }
        }
        let passes = &table.passes;
        for (field, passes) in [
            ("block_forward", &passes.block_forward),
            ("block_backward", &passes.block_backward),
            ("embedding_forward", &passes.embedding_forward),
            ("embedding_backward", &passes.embedding_backward),
            ("head_forward", &passes.head_forward),
            ("head_backward", &passes.head_backward),
        ] {
            if passes
                .iter()
                .any(|pass| pass.times > LAUNCHES_MAX || pass.bytes_per_element > BYTES_MAX)
            {
                let problem = format!("more than {LAUNCHES_MAX} launches or {BYTES_MAX} bytes");
                defects.push(Defect::new(format!("passes.{field}"), problem));
            }
        }
        defects.into_result(table)
    }

    /// The built-in table of this name.
    ///
    /// # Errors
    /// No built-in table has that name.
    pub fn built_in(name: &str) -> Result<FrameworkTable, Defects> {
        let found = FRAMEWORKS.iter().find(|(path, _)| table_name(path) == name);
        let Some((path, text)) = found else {
            let names: Vec<&str> = FrameworkTable::names().collect();
            let problem = format!("there is no table of a framework called `{name}`");
            return Err(Defect::new("framework", problem).hint(names.join(", ")).into());
        };
        FrameworkTable::read(path, text)
    }

    /// The names of all built-in tables.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FRAMEWORKS.iter().map(|(path, _)| table_name(path))
    }
}

/// The name of a table, from its path without extension.
fn table_name(path: &'static str) -> &'static str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_profile_is_other_hardware_whatever_its_name() {
        let (name, text) = FRAMEWORKS[0];
        let table = FrameworkTable::read(name, text).expect("a table");
        let fitted = preset(&table.errors.fitted_hardware[0]).expect("a preset");
        let mut file = fitted.file().clone();
        file.device.memory_bandwidth_bytes_per_s *= 1.1;
        let changed = file.resolve().expect("a profile");
        assert_eq!(changed.name(), fitted.name());
        let [of_fit, of_others] = [&fitted, &changed].map(|p| table.errors.of(p).1);
        assert!(of_others[1] > of_fit[1], "{of_fit:?} and {of_others:?}");
    }
}
