//! Tables of frameworks: read, validated and found by name.

use narrows_cost_model::Profile;
use narrows_plan::{DType, Defect, Defects, json};
use narrows_profiles::FRAMEWORKS;

use super::file::{FrameworkTable, StageDivision};

/// Largest factor, fraction or time of a table.
const VALUE_MAX: f64 = 1e3;
/// Most launches of one entry.
const LAUNCHES_MAX: u64 = 1000;
/// Most bytes of an element in one launch.
const BYTES_MAX: u64 = 1000;

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

    /// Reads and validates a table.
    ///
    /// # Errors
    /// A syntax error or an unknown field, else every value outside its range.
    pub fn read(text: &str) -> Result<FrameworkTable, Defects> {
        let table: FrameworkTable = json::read(text)?;
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
            ("host.lockstep", table.host.lockstep),
            ("device.operator_s", table.device.operator_s),
        ] {
            if !(0.0..=VALUE_MAX).contains(&value) {
                defects.push(Defect::new(
                    field,
                    format!("{value} is not a time in seconds or a fraction"),
                ));
            }
        }
        if table.attention.fused_softmax_matrices == 0 {
            defects.push(Defect::new("attention.fused_softmax_matrices", "is 0".to_owned()));
        }
        let passes = &table.passes;
        for (field, passes) in [
            ("block_forward", &passes.block_forward),
            ("attention_core", &passes.attention_core),
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
        let Some((_, text)) = found else {
            let names: Vec<&str> = FrameworkTable::names().collect();
            let problem = format!("there is no table of a framework called `{name}`");
            return Err(Defect::new("framework", problem).hint(names.join(", ")).into());
        };
        FrameworkTable::read(text)
    }

    /// The longest time that the host needs for one operator in any built-in table, in seconds.
    pub fn operator_s_max() -> f64 {
        let read = |(_, text): &(&str, &str)| FrameworkTable::read(text).ok();
        let times = FRAMEWORKS.iter().filter_map(read).map(|table| table.host.operator_s);
        times.fold(0.0, f64::max)
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
