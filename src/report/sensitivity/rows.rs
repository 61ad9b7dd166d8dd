//! Numbers of a sensitivity analysis as rows of JSON.

use narrows_plan::Plan;
use schemars::JsonSchema;
use serde::Serialize;

use crate::field_name::FieldName;
use crate::sensitivity::{
    AssumedParameter, Estimate, ParameterElasticity, ParameterGroup, UPGRADES, Upgrade,
    VariedParameter,
};

/// Percent by which the step time changes for one percent of a number.
#[derive(Serialize, JsonSchema)]
pub struct ElasticityRow {
    /// Name as in `whatif --list`; a curve such as `hardware.attention.forward.efficiency` is scaled as a whole.
    pub number: FieldName,
    /// Subject of the number.
    pub kind: ParameterGroup,
    /// Present value; of a curve, that of its first point.
    pub value: f64,
    /// Smallest and largest value where several are scaled together.
    #[serde(skip)]
    pub values: [f64; 2],
    /// Whether the profile calls the number assumed.
    pub is_assumed: bool,
    /// Values of the difference, relative to the present one.
    pub factors: [f64; 2],
    /// d ln(step time) / d ln(value) of the fastest plan for each value.
    pub replanned: Estimate,
    /// The same of the present plan; `null` where it does not fit other values.
    pub kept_plan: Option<Estimate>,
    /// Whether the upgrades and the range of the number were planned as well.
    #[serde(skip)]
    pub is_complete: bool,
}

/// Shares of the step time that better hardware saves.
#[derive(Serialize, JsonSchema)]
pub struct UpgradeRow {
    /// Name as in `whatif --list`.
    pub number: FieldName,
    /// Present value.
    pub value: f64,
    /// Gains by factor, smallest factor first.
    pub gains: Vec<GainRow>,
}

/// Gain from one factor.
#[derive(Serialize, JsonSchema)]
pub struct GainRow {
    /// Ratio of the new value to the present one.
    pub factor: f64,
    /// Share of the step time saved by the fastest plan for the new value; `null` without a plan.
    pub gain: Option<Estimate>,
}

/// Consequences of an error of an assumed number.
#[derive(Serialize, JsonSchema)]
pub struct AssumedRow {
    /// Name as in `whatif --list`.
    pub number: FieldName,
    /// Present value.
    pub value: f64,
    /// Lowest and highest value for which the request was planned.
    pub range: [f64; 2],
    /// Elasticity of the step time; `null` if it was not found.
    pub elasticity: Option<f64>,
    /// The nearest value found at which another plan is the fastest; `null` if there is none in the range. If the answer is
    /// not complete, there may be a nearer one.
    pub change: Option<ChangeRow>,
    /// Step time of the present plan over that of the fastest, less one, at both ends of the range.
    pub losses: [Option<f64>; 2],
    /// Whether the present plan does not fit in memory at an end of the range.
    pub exceeds_memory: bool,
}

/// A value at which another plan becomes the fastest.
#[derive(Serialize, JsonSchema)]
pub struct ChangeRow {
    /// The value.
    pub value: f64,
    /// Ratio to the present value.
    pub factor: f64,
    /// Share of the step time lost there by keeping the present plan; `null` where it does not fit.
    pub loss: Option<f64>,
    /// The plan that is the fastest there.
    pub decisions: Plan,
}

impl From<&ParameterElasticity> for ElasticityRow {
    fn from(of: &ParameterElasticity) -> ElasticityRow {
        let VariedParameter { name, kind, is_assumed, .. } = &of.number;
        ElasticityRow {
            number: name.clone(),
            kind: *kind,
            value: of.number.value(),
            values: of.number.values(),
            is_assumed: *is_assumed,
            factors: of.factors,
            replanned: of.replanned,
            kept_plan: of.kept,
            is_complete: of.is_complete,
        }
    }
}

impl From<&Upgrade> for UpgradeRow {
    fn from(upgrade: &Upgrade) -> UpgradeRow {
        let gain = |(factor, gain): (f64, &Option<Estimate>)| {
            let factor = if upgrade.is_reduced { 1.0 / factor } else { factor };
            GainRow { factor, gain: *gain }
        };
        UpgradeRow {
            number: upgrade.number.name.clone(),
            value: upgrade.number.value(),
            gains: UPGRADES.into_iter().zip(&upgrade.gains).map(gain).collect(),
        }
    }
}

impl From<&AssumedParameter> for AssumedRow {
    fn from(assumed: &AssumedParameter) -> AssumedRow {
        let value = assumed.number.value();
        AssumedRow {
            number: assumed.number.name.clone(),
            value,
            range: assumed.range.map(|factor| factor * value),
            elasticity: assumed.elasticity,
            change: assumed.change.as_ref().map(|change| ChangeRow {
                value: change.factor * value,
                factor: change.factor,
                loss: change.saved,
                decisions: change.plan.clone(),
            }),
            losses: assumed.losses,
            exceeds_memory: assumed.exceeds_memory,
        }
    }
}

impl AssumedRow {
    /// The largest loss at an end of the range; infinite where the present plan does not fit.
    pub fn worst_loss(&self) -> f64 {
        let exceeded = self.exceeds_memory.then_some(f64::INFINITY);
        self.losses.iter().flatten().copied().chain(exceeded).fold(0.0, f64::max)
    }
}
