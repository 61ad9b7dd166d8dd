//! Numbers of hardware, model and workload that are varied.

use narrows_cost_model::Executor;
use narrows_cost_model::profile::ProvenanceKind;
use narrows_plan::DType;
use narrows_planner::Request;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::errors::{CommandResult, Failure};
use crate::field_name::FieldName;
use crate::unit::Unit;
use crate::whatif::{Document, ScalarField, Scenario, SweepField, number};

/// Ratio of the higher value of a difference to the present value.
pub const STEP: f64 = 1.05;

/// Step of whole numbers of the model, relative to their value: shapes must still divide.
const SHAPE_STEP: f64 = 0.125;

/// Endings of hardware numbers that no step time depends on, or that describe the wiring of nodes.
const NOT_VARIED: [&str; 5] = [
    "half_width_90",
    "error_growth.per_octave",
    "devices_per_node",
    "nics_per_node",
    "price_per_device_hour",
];

/// Sizes of model files and Hugging Face configs that are varied.
const SHAPES: [&str; 8] = [
    "hidden",
    "hidden_size",
    "vocab",
    "vocab_size",
    "d_ff",
    "intermediate_size",
    "blocks.count",
    "num_hidden_layers",
];

/// Subject of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ParameterGroup {
    /// The hardware profile.
    Hardware,
    /// The model file.
    Model,
    /// Devices, batch and sequence length.
    Workload,
}

/// A number that is varied, or several that are scaled together.
#[derive(Clone, Debug)]
pub struct VariedParameter {
    /// Name as in `whatif --list`; for the points of a curve that of the curve.
    pub name: FieldName,
    /// Subject of the number.
    pub kind: ParameterGroup,
    /// Whether the profile calls it assumed.
    pub is_assumed: bool,
    /// Fields with their present values, at least one.
    fields: Vec<(SweepField, f64)>,
    /// Unit of a whole number; zero for a real number.
    granule: f64,
    /// Largest factor that keeps all values in their range.
    factor_max: f64,
    /// Smallest value that the fields take.
    value_min: f64,
    /// Factors of the ends of a difference.
    ends: [f64; 2],
}

/// Values of a number for one factor.
#[derive(Clone, Debug)]
pub struct ScaledValue {
    /// Ratio of the value to the present one, after rounding.
    pub factor: f64,
    /// Values of all fields.
    pub settings: Vec<(SweepField, Value)>,
}

impl VariedParameter {
    /// All numbers of a request that are varied: of the hardware, the model and the workload.
    ///
    /// # Errors
    /// A name that is no field, which would be a bug.
    pub fn all(scenario: &Scenario, request: &Request) -> CommandResult<Vec<VariedParameter>> {
        let mut numbers = hardware_numbers(scenario, request)?;
        numbers.extend(model_numbers(scenario)?);
        let Request { devices, global_batch, sequence_length, .. } = request;
        for (name, value) in [
            ("devices", devices),
            ("global_batch", global_batch),
            ("sequence_length", sequence_length),
        ] {
            let value = *value as f64;
            let fields = vec![(known_field(scenario, name)?, value)];
            let mut number = VariedParameter::whole(
                name,
                ParameterGroup::Workload,
                fields,
                shape_granule(value),
            );
            if name != "sequence_length" {
                (number.granule, number.ends) = (1.0, [0.5, 2.0]);
            }
            numbers.push(number);
        }
        Ok(numbers)
    }

    fn real(name: FieldName, fields: Vec<(SweepField, f64)>) -> VariedParameter {
        VariedParameter {
            name,
            kind: ParameterGroup::Hardware,
            is_assumed: false,
            fields,
            granule: 0.0,
            factor_max: f64::INFINITY,
            value_min: 0.0,
            ends: [1.0 / STEP, STEP],
        }
    }

    fn whole(
        name: &str,
        kind: ParameterGroup,
        fields: Vec<(SweepField, f64)>,
        granule: f64,
    ) -> VariedParameter {
        let ends = [1.0 - SHAPE_STEP, 1.0 + SHAPE_STEP];
        VariedParameter {
            kind,
            granule,
            ends,
            ..VariedParameter::real(FieldName::new(name), fields)
        }
    }

    /// The present value; of a curve, that of its first point.
    pub fn value(&self) -> f64 {
        self.fields[0].1
    }

    /// Smallest and largest present value of the fields that are scaled together.
    pub fn values(&self) -> [f64; 2] {
        let values = || self.fields.iter().map(|(_, value)| *value);
        [values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max)]
    }

    /// Factors of the ends of a difference.
    pub fn ends(&self) -> [f64; 2] {
        self.ends
    }

    /// The present values of all fields.
    pub fn present(&self) -> Vec<(SweepField, Value)> {
        self.fields.iter().map(|(field, value)| (field.clone(), number(*value))).collect()
    }

    /// The values for a factor, rounded and within their range; `None` where these are the present ones.
    pub fn scaled(&self, factor: f64) -> Option<ScaledValue> {
        let factor = factor.min(self.factor_max);
        let values: Vec<f64> = self
            .fields
            .iter()
            .map(|(_, value)| match self.granule {
                0.0 => (value * factor).max(self.value_min),
                granule => (value * factor / granule).round().max(1.0) * granule,
            })
            .collect();
        let factor = values[0] / self.value();
        let fields = self.fields.iter().map(|(field, _)| field.clone());
        let settings = fields.zip(values.into_iter().map(number)).collect();
        (factor != 1.0 && factor > 0.0).then_some(ScaledValue { factor, settings })
    }
}

/// The field of a name that is not typed.
fn known_field(scenario: &Scenario, name: &str) -> CommandResult<SweepField> {
    scenario.field(name).map_err(Failure::input)
}

/// Numbers of the profile that the step time of a request may depend on, without those that are zero.
fn hardware_numbers(scenario: &Scenario, request: &Request) -> CommandResult<Vec<VariedParameter>> {
    let document = scenario.hardware();
    let executors = &request.profile.file().executors;
    let used_executor = match (request.executor, &executors.compiled) {
        (Executor::Captured, _) => "executors.captured.",
        (Executor::Compiled, Some(_)) => "executors.compiled.",
        (Executor::Compiled, None) | (Executor::Eager, _) => "executors.eager.",
    };
    let unused_peak = match request.profile.file().precision.compute_dtype() {
        DType::F32 => "device.peak_flops_per_s.bf16",
        _ => "device.peak_flops_per_s.f32",
    };
    let mut numbers: Vec<VariedParameter> = vec![];
    for field in document.fields() {
        let path = field.path;
        let Some(value) = field.value.as_ref().and_then(Value::as_f64) else { continue };
        let is_varied = value > 0.0
            && !NOT_VARIED.iter().any(|ending| path.ends_with(ending))
            && (!path.starts_with("executors.") || path.starts_with(used_executor))
            && path != unused_peak;
        if !is_varied {
            continue;
        }
        let name = format!("hardware.{path}");
        let fields = vec![(known_field(scenario, &name)?, value)];
        let name = FieldName::new(name);
        let is_whole = field.value.as_ref().is_some_and(|value| !value.is_f64());
        let granule = if is_whole { 1.0 } else { 0.0 };
        numbers.push(VariedParameter { granule, ..VariedParameter::real(name, fields) });
    }
    for (curve, paths) in curves(document) {
        let fields = paths.iter().map(|path| {
            let value = document.number(path).unwrap_or_default();
            Ok((known_field(scenario, &format!("hardware.{path}"))?, value))
        });
        let fields = fields.collect::<CommandResult<_>>()?;
        numbers.push(VariedParameter::real(FieldName::new(format!("hardware.{curve}")), fields));
    }
    for number in &mut numbers {
        if number.name.unit() == Unit::Efficiency {
            let largest = number.fields.iter().map(|(_, value)| *value).fold(0.0, f64::max);
            number.factor_max = 1.0 / largest;
        }
        let path = number.name.as_str().trim_start_matches("hardware.");
        if path.starts_with("overlap.") && path.ends_with("_slowdown") {
            number.value_min = 1.0;
        }
        number.is_assumed = is_assumed(request, path);
    }
    Ok(numbers)
}

/// Names of the assumed numbers of the profile that are zero, so that no factor varies them.
pub fn assumed_zeros(scenario: &Scenario, request: &Request) -> Vec<FieldName> {
    let is_zero = |field: &ScalarField| {
        field.value.as_ref().and_then(Value::as_f64) == Some(0.0)
            && is_assumed(request, &field.path)
    };
    let zeros = scenario.hardware().fields().into_iter().filter(is_zero);
    zeros.map(|field| FieldName::new(format!("hardware.{}", field.path))).collect()
}

/// Efficiencies in lists, by the name of their curve.
fn curves(document: &Document) -> Vec<(String, Vec<String>)> {
    let mut curves: Vec<(String, Vec<String>)> = vec![];
    for path in document.paths_of("efficiency") {
        let mut parts: Vec<&str> = path.split('.').collect();
        let Some(index) = parts.iter().position(|part| part.parse::<usize>().is_ok()) else {
            continue;
        };
        parts.remove(index);
        let curve = parts.join(".");
        match curves.iter_mut().find(|(known, _)| *known == curve) {
            Some((_, paths)) => paths.push(path),
            None => curves.push((curve, vec![path])),
        }
    }
    curves
}

/// Whether the group of a number, or its field in the group, is assumed.
fn is_assumed(request: &Request, path: &str) -> bool {
    let groups = request.profile.provenance();
    let within = |path: &str, group: &str| {
        path.strip_prefix(group).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let nearest = groups.iter().filter(|(group, _)| within(path, group)).max_by_key(|g| g.0.len());
    let Some((group, provenance)) = nearest else { return false };
    let field = path.strip_prefix(group).unwrap_or_default().trim_start_matches('.');
    provenance.kind == ProvenanceKind::Assumed
        || provenance.assumed.iter().any(|assumed| within(field, assumed))
}

fn model_numbers(scenario: &Scenario) -> CommandResult<Vec<VariedParameter>> {
    let document = scenario.model();
    let mut numbers = vec![];
    for shape in SHAPES {
        if let Some(value) = document.number(shape) {
            let name = format!("model.{shape}");
            let fields = vec![(known_field(scenario, &name)?, value)];
            let granule = shape_granule(value);
            numbers.push(VariedParameter::whole(&name, ParameterGroup::Model, fields, granule));
        }
    }
    let ranks = document.paths_of("rank").into_iter().map(|path| {
        let value = document.number(&path).unwrap_or_default();
        Ok((known_field(scenario, &format!("model.{path}"))?, value))
    });
    let ranks = ranks.collect::<CommandResult<Vec<_>>>()?;
    let smallest = ranks.iter().map(|(_, rank)| *rank).min_by(f64::total_cmp);
    if let Some(smallest) = smallest {
        let granule = ranks.iter().map(|(_, rank)| shape_granule(*rank)).fold(smallest, f64::min);
        numbers.push(VariedParameter::whole("rank", ParameterGroup::Model, ranks, granule));
    }
    Ok(numbers)
}

/// The largest power of two that divides a size and is at most its step, so that a changed shape divides nearly as well.
fn shape_granule(value: f64) -> f64 {
    let mut granule = 1.0;
    while value % (2.0 * granule) == 0.0 && 2.0 * granule <= value * SHAPE_STEP {
        granule *= 2.0;
    }
    granule
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_shapes_keep_large_divisors() {
        for (value, granule) in [(4096.0, 512.0), (11008.0, 256.0), (12.0, 1.0), (77.0, 1.0)] {
            assert_eq!(shape_granule(value), granule, "{value}");
        }
    }

    #[test]
    fn values_are_rounded_and_stay_in_their_range() {
        let field = || SweepField::Flag("devices".into());
        let rank =
            VariedParameter::whole("rank", ParameterGroup::Model, vec![(field(), 1024.0)], 128.0);
        let scaled = rank.scaled(1.1).unwrap();
        assert_eq!((scaled.factor, &scaled.settings[0].1), (1.125, &Value::from(1152)));
        assert!(rank.scaled(1.01).is_none(), "rounds to the present value");
        let mut share = VariedParameter::real(FieldName::new("efficiency"), vec![(field(), 0.8)]);
        share.factor_max = 1.25;
        assert_eq!(share.scaled(2.0).unwrap().factor, 1.25);
        let mut slowdown = VariedParameter::real(FieldName::new("slowdown"), vec![(field(), 1.3)]);
        slowdown.value_min = 1.0;
        assert_eq!(slowdown.scaled(0.5).unwrap().settings[0].1, Value::from(1));
        assert_eq!(slowdown.scaled(0.5).unwrap().factor, 1.0 / 1.3);
        let mut none = VariedParameter::real(FieldName::new("slowdown"), vec![(field(), 1.0)]);
        none.value_min = 1.0;
        assert!(none.scaled(0.5).is_none(), "the least value has none below it");
    }
}
