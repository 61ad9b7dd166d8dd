//! All variants of a request in parallel, and what follows from them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use narrows_plan::Plan;
use narrows_planner::{Request, SearchCache};
use rayon::prelude::*;

use crate::errors::CommandResult;
use crate::field_name::FieldName;
use crate::search_defects::SearchDefects;
use crate::whatif::{Scenario, geometric_mean};

use super::difference::{Estimate, elasticity, gain};
use super::number::{ParameterGroup, VariedParameter, assumed_zeros};
use super::variant::{StepSample, Variant};

/// Factors of improvements of the hardware.
pub const UPGRADES: [f64; 2] = [1.1, 2.0];

/// Assumed numbers are scanned from one over this factor to this factor.
const RANGE_FACTOR: f64 = 2.0;

/// Factors at which assumed numbers are scanned; the ends of the range are the first and the last.
const SCANNED: [f64; 4] =
    [1.0 / RANGE_FACTOR, std::f64::consts::FRAC_1_SQRT_2, std::f64::consts::SQRT_2, RANGE_FACTOR];

/// Bisections between a value that keeps the plan and one that changes it: to 2 % from a factor of √2.
const BISECTIONS: usize = 4;

/// Endings of hardware numbers that money buys, and whether less of them is better.
const BOUGHT: [(&str, bool); 6] = [
    ("device.memory_bytes", false),
    ("device.memory_bandwidth_bytes_per_s", false),
    ("device.peak_flops_per_s", false),
    ("intra_node.bandwidth_bytes_per_s", false),
    ("inter_node.bandwidth_bytes_per_s", false),
    ("launch_gap_s", true),
];

/// Sensitivities of the step time of one plan.
#[derive(Debug)]
pub struct Analysis {
    /// Elasticities, the largest first. This list and the next two lack numbers that were not planned before Ctrl-C.
    pub elasticities: Vec<ParameterElasticity>,
    /// Improvements of the hardware, the largest gain first.
    pub upgrades: Vec<Upgrade>,
    /// Assumed numbers, those whose error costs the most first.
    pub assumed: Vec<AssumedParameter>,
    /// Names of assumed numbers that are zero, so that no factor varies them.
    pub not_varied: Vec<FieldName>,
    /// Whether every variant was planned; `false` after Ctrl-C.
    pub is_complete: bool,
    /// Defects of the searches.
    pub defects: SearchDefects,
}

/// Elasticity of the step time with respect to one number.
#[derive(Debug)]
pub struct ParameterElasticity {
    /// The number.
    pub number: VariedParameter,
    /// Lower and higher value of the difference, relative to the present one.
    pub factors: [f64; 2],
    /// Elasticity of the fastest plan for each value.
    pub replanned: Estimate,
    /// Elasticity of the present plan; `None` where it does not fit other values.
    pub kept: Option<Estimate>,
    /// Whether the upgrades and the range of the number were planned as well.
    pub is_complete: bool,
}

/// Gains from improvements of one number by the factors of [`UPGRADES`].
#[derive(Debug)]
pub struct Upgrade {
    /// The number.
    pub number: VariedParameter,
    /// Whether less of it is better, so that it is divided by the factor.
    pub is_reduced: bool,
    /// Share of the step time saved by each factor; `None` where no plan was found.
    pub gains: [Option<Estimate>; 2],
}

/// An assumed number, and what its error would do to the choice of the plan.
#[derive(Debug)]
pub struct AssumedParameter {
    /// The number.
    pub number: VariedParameter,
    /// Scanned range, relative to the present value.
    pub range: [f64; 2],
    /// The nearest value at which another plan is the fastest, if one was found; after Ctrl-C, there may be a nearer one.
    pub change: Option<PlanChange>,
    /// Step time of the present plan over that of the fastest, less one, at both ends of the range; `None` where one of
    /// the two does not exist.
    pub losses: [Option<f64>; 2],
    /// Whether the present plan does not fit in memory at an end of the range.
    pub exceeds_memory: bool,
    /// Elasticity of the step time, if it was found.
    pub elasticity: Option<f64>,
}

/// A value at which another plan becomes the fastest.
#[derive(Debug)]
pub struct PlanChange {
    /// The value, relative to the present one.
    pub factor: f64,
    /// Step time saved there, relative to the present plan.
    pub saved: Option<f64>,
    /// The plan that is the fastest there.
    pub plan: Plan,
}

impl AssumedParameter {
    /// The largest loss at an end of the range; infinite where the present plan does not fit.
    pub fn worst_loss(&self) -> f64 {
        let losses = self.losses.iter().flatten().copied();
        let exceeded = self.exceeds_memory.then_some(f64::INFINITY);
        losses.chain(exceeded).fold(0.0, f64::max)
    }
}

/// Plans of variants: of which number, and for which factor.
type VariantKey = (usize, f64);

/// Variants that were planned, and how to plan more.
struct Variants<'a> {
    scenario: &'a Scenario,
    present: &'a Plan,
    numbers: &'a [VariedParameter],
    cache: SearchCache,
    stop: &'a Arc<AtomicBool>,
    /// Variants that were reached before `stop`; `None` for a value that a field does not take, such as an efficiency
    /// above one.
    reached: Vec<(VariantKey, Option<Variant>)>,
}

impl Variants<'_> {
    /// Plans variants in parallel, until stopped. `begin` gets their number, `progress` is called after each.
    fn plan(&mut self, keys: Vec<VariantKey>, begin: &dyn Fn(u64), progress: &(dyn Fn() + Sync)) {
        let rounded = |(index, factor): VariantKey| {
            let value = self.numbers[index].scaled(factor)?;
            Some((index, value.factor))
        };
        let mut keys: Vec<VariantKey> = keys.into_iter().filter_map(rounded).collect();
        keys.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        keys.dedup();
        keys.retain(|key| !self.is_reached(key.0, key.1));
        begin(keys.len() as u64);
        let plan = |key: &VariantKey| -> Option<(VariantKey, Option<Variant>)> {
            let value = self.numbers[key.0].scaled(key.1);
            let Some(value) = value.filter(|_| !self.stop.load(Ordering::Relaxed)) else {
                progress();
                return None;
            };
            let variant = Variant::new(self.scenario, self.present, &value, &self.cache, self.stop);
            progress();
            match variant {
                Ok(variant) => variant.map(|variant| (*key, Some(variant))),
                Err(_) => Some((*key, None)),
            }
        };
        let reached: Vec<_> = keys.par_iter().filter_map(plan).collect();
        self.reached.extend(reached);
    }

    /// The variant for a factor, if it was reached; `None` for the present value.
    fn find(&self, number: usize, factor: f64) -> Option<&Option<Variant>> {
        let key = (number, self.numbers[number].scaled(factor)?.factor);
        self.reached.iter().find(|(known, _)| *known == key).map(|(_, variant)| variant)
    }

    fn get(&self, number: usize, factor: f64) -> Option<&Variant> {
        self.find(number, factor)?.as_ref()
    }

    /// Whether the variant for a factor was reached, or needs no plan because it is the present one.
    fn is_reached(&self, number: usize, factor: f64) -> bool {
        self.numbers[number].scaled(factor).is_none() || self.find(number, factor).is_some()
    }

    fn are_reached(&self, number: usize, factors: &[f64]) -> bool {
        factors.iter().all(|factor| self.is_reached(number, *factor))
    }

    /// Whether another plan than the present one is the fastest; `None` without a plan.
    fn is_changed(&self, number: usize, factor: f64) -> Option<bool> {
        let replanned = self.get(number, factor)?.replanned.as_ref()?;
        Some(!is_same_plan(&replanned.plan, self.present))
    }
}

/// Whether two plans decide the same, on whichever hardware.
fn is_same_plan(a: &Plan, b: &Plan) -> bool {
    Plan { hardware: b.hardware.clone(), ..a.clone() } == *b
}

/// Varies every number of a request whose fastest plan is `present`.
///
/// # Errors
/// A name that is no field, which would be a bug.
pub fn analyse(
    scenario: &Scenario,
    request: &Request,
    present: &Plan,
    step: &StepSample,
    stop: &Arc<AtomicBool>,
    begin: &dyn Fn(u64),
    progress: &(dyn Fn() + Sync),
) -> CommandResult<Analysis> {
    let numbers = VariedParameter::all(scenario, request)?;
    let cache = SearchCache::default();
    let mut variants =
        Variants { scenario, present, numbers: &numbers, cache, stop, reached: vec![] };
    let factors_of =
        |(index, number)| factors(number).into_iter().map(move |factor| (index, factor));
    let keys = numbers.iter().enumerate().flat_map(factors_of).collect();
    variants.plan(keys, begin, progress);
    let changes = plan_changes(&mut variants, begin, progress);
    let steps = present_steps(&variants, request, step);
    let elasticities = elasticities(&variants, &steps);
    let mut upgrades = upgrades(&variants, &steps);
    let doubled = |upgrade: &Upgrade| upgrade.gains[1].map_or(f64::NEG_INFINITY, |gain| gain.value);
    upgrades.sort_by(|a, b| doubled(b).total_cmp(&doubled(a)));
    let mut assumed = assumed_numbers(&variants, changes, &elasticities);
    let rank = |number: &AssumedParameter| {
        (number.worst_loss(), number.elasticity.unwrap_or_default().abs())
    };
    assumed.sort_by(|a, b| rank(b).partial_cmp(&rank(a)).unwrap_or(std::cmp::Ordering::Equal));
    let planned = variants.reached.iter().filter_map(|(_, variant)| variant.as_ref());
    let defects = planned.map(|variant| variant.defects).sum();
    let is_complete = !stop.load(Ordering::Relaxed);
    let not_varied = assumed_zeros(scenario, request);
    Ok(Analysis { elasticities, upgrades, assumed, not_varied, is_complete, defects })
}

/// Factors for which a number is planned, before changes of the plan are bisected.
fn factors(number: &VariedParameter) -> Vec<f64> {
    let mut factors = number.ends().to_vec();
    if let Some(is_reduced) = bought(number) {
        factors.extend(UPGRADES.map(|factor| upgraded(factor, is_reduced)));
    }
    if number.is_assumed {
        factors.extend(SCANNED);
    }
    factors
}

/// Whether less of a number is better, if money buys it.
fn bought(number: &VariedParameter) -> Option<bool> {
    let found = BOUGHT.iter().find(|(part, _)| number.name.as_str().contains(part));
    found.map(|(_, is_reduced)| *is_reduced)
}

fn upgraded(factor: f64, is_reduced: bool) -> f64 {
    if is_reduced { 1.0 / factor } else { factor }
}

/// The present step for each number, with the same errors as its variants. `step` has the errors of the profile as it is.
fn present_steps(variants: &Variants, request: &Request, step: &StepSample) -> Vec<StepSample> {
    let has_refits = request.profile.file().refits.is_some();
    let of_number = |number: &VariedParameter| {
        let is_set = has_refits && number.kind == ParameterGroup::Hardware;
        let own = is_set.then(|| {
            StepSample::with_errors_of_variants(variants.scenario, variants.present, number)
        });
        own.flatten().unwrap_or_else(|| step.clone())
    };
    variants.numbers.par_iter().map(of_number).collect()
}

fn elasticities(variants: &Variants, present: &[StepSample]) -> Vec<ParameterElasticity> {
    let numbers = variants.numbers.iter().enumerate();
    let mut found: Vec<ParameterElasticity> = numbers
        .filter(|(index, number)| variants.are_reached(*index, &number.ends()))
        .filter_map(|(index, number)| {
            let ends = number.ends().map(|factor| variants.get(index, factor));
            let replanned = |variant: &&Variant| {
                let step = &variant.replanned.as_ref()?.step;
                Some((variant.factor, step.clone()))
            };
            let kept =
                |variant: &&Variant| Some((variant.factor, variant.kept.as_ref()?.step.clone()));
            let (factors, replanned) =
                quotient(ends.map(|v| v.as_ref().and_then(replanned)), &present[index])?;
            let kept = quotient(ends.map(|v| v.as_ref().and_then(kept)), &present[index]);
            let kept = kept.map(|(_, estimate)| estimate);
            let is_complete = variants.are_reached(index, &self::factors(number));
            let number = number.clone();
            Some(ParameterElasticity { number, factors, replanned, kept, is_complete })
        })
        .collect();
    let size = |of: &ParameterElasticity| of.replanned.value.abs();
    found.sort_by(|a, b| size(b).total_cmp(&size(a)));
    found
}

/// The elasticity between two ends, with the present step in place of one that does not exist.
fn quotient(
    ends: [Option<(f64, StepSample)>; 2],
    present: &StepSample,
) -> Option<([f64; 2], Estimate)> {
    if ends.iter().all(Option::is_none) {
        return None;
    }
    let [(low, at_low), (high, at_high)] =
        ends.map(|end| end.unwrap_or_else(|| (1.0, present.clone())));
    Some(([low, high], elasticity(&at_low, &at_high, high / low)))
}

fn upgrades(variants: &Variants, present: &[StepSample]) -> Vec<Upgrade> {
    let numbers = variants.numbers.iter().enumerate();
    let upgrade = |(index, number): (usize, &VariedParameter)| {
        let is_reduced = bought(number)?;
        let factors = UPGRADES.map(|factor| upgraded(factor, is_reduced));
        if !variants.are_reached(index, &factors) {
            return None;
        }
        let gains = factors.map(|factor| {
            let variant = variants.get(index, factor)?;
            Some(gain(&present[index], &variant.replanned.as_ref()?.step))
        });
        let is_found = gains.iter().any(Option::is_some);
        is_found.then(|| Upgrade { number: number.clone(), is_reduced, gains })
    };
    numbers.filter_map(upgrade).collect()
}

/// The nearest factor at which the plan of each number changes, with those that were found by bisection.
fn plan_changes(
    variants: &mut Variants,
    begin: &dyn Fn(u64),
    progress: &(dyn Fn() + Sync),
) -> Vec<(usize, f64)> {
    // A factor without a change to another plan and one with it, for each number and direction.
    let mut brackets: Vec<(usize, [f64; 2])> = vec![];
    for index in 0..variants.numbers.len() {
        if !variants.numbers[index].is_assumed {
            continue;
        }
        let (below, above) = SCANNED.split_at(SCANNED.len() / 2);
        let directions = [below.iter().rev().copied().collect::<Vec<_>>(), above.to_vec()];
        for factors in directions {
            let mut unchanged = 1.0;
            for factor in factors {
                if variants.is_changed(index, factor) == Some(true) {
                    brackets.push((index, [unchanged, factor]));
                    break;
                }
                unchanged = factor;
            }
        }
    }
    for _ in 0..BISECTIONS {
        let keys = brackets.iter().map(|(index, ends)| (*index, geometric_mean(*ends))).collect();
        variants.plan(keys, begin, progress);
        for (index, ends) in &mut brackets {
            *ends = narrowed(*ends, variants.is_changed(*index, geometric_mean(*ends)));
        }
    }
    brackets.into_iter().map(|(index, [_, changed])| (index, changed)).collect()
}

/// The half of a bracket in which the plan changes. A middle without a plan, or one that rounds to the present value, is
/// no change to another plan, so that the bracket still ends at a factor with another plan.
fn narrowed(ends: [f64; 2], middle_is_changed: Option<bool>) -> [f64; 2] {
    match middle_is_changed {
        Some(true) => [ends[0], geometric_mean(ends)],
        Some(false) | None => [geometric_mean(ends), ends[1]],
    }
}

fn assumed_numbers(
    variants: &Variants,
    changes: Vec<(usize, f64)>,
    elasticities: &[ParameterElasticity],
) -> Vec<AssumedParameter> {
    let numbers = variants
        .numbers
        .iter()
        .enumerate()
        .filter(|(index, number)| number.is_assumed && variants.are_reached(*index, &SCANNED));
    let assumed = |(index, number): (usize, &VariedParameter)| {
        let ends = [SCANNED[0], SCANNED[SCANNED.len() - 1]];
        let at_ends = ends.map(|factor| variants.get(index, factor));
        let nearest = changes
            .iter()
            .filter(|(of, _)| *of == index)
            .filter_map(|(_, factor)| variants.get(index, *factor))
            .min_by(|a, b| a.factor.ln().abs().total_cmp(&b.factor.ln().abs()));
        let change = nearest.and_then(|variant| {
            let plan = variant.replanned.as_ref()?.plan.clone();
            Some(PlanChange { factor: variant.factor, saved: loss(variant), plan })
        });
        let of_number = |of: &&ParameterElasticity| of.number.name == number.name;
        AssumedParameter {
            number: number.clone(),
            range: at_ends.map(|variant| variant.map_or(1.0, |variant| variant.factor)),
            change,
            losses: at_ends.map(|variant| variant.and_then(loss)),
            exceeds_memory: at_ends.iter().flatten().any(|variant| exceeds_memory(variant)),
            elasticity: elasticities.iter().find(of_number).map(|of| of.replanned.value),
        }
    };
    numbers.map(assumed).collect()
}

/// Step time of the present plan over that of the fastest, less one. The search may end at a gap, so that the present
/// plan is the faster of the two.
fn loss(variant: &Variant) -> Option<f64> {
    let replanned = variant.replanned.as_ref()?;
    let kept = variant.kept.as_ref().filter(|kept| kept.fits)?;
    Some((kept.step.time_s / replanned.step.time_s - 1.0).max(0.0))
}

fn exceeds_memory(variant: &Variant) -> bool {
    variant.kept.as_ref().is_some_and(|kept| !kept.fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A range without plans, or of values that round to the present one, separates the present value from the change.
    #[test]
    fn points_without_a_plan_do_not_stop_a_bisection() {
        let mut found = vec![];
        for (hole, change) in [([1.0, 1.0], 1.3), ([1.1, 1.3], 1.3), ([1.0, 1.35], 1.35)] {
            let mut ends = [1.0, std::f64::consts::SQRT_2];
            for _ in 0..BISECTIONS {
                let factor = geometric_mean(ends);
                let is_in_hole = hole[0] < factor && factor < hole[1];
                ends = narrowed(ends, (!is_in_hole).then_some(factor >= change));
            }
            assert!(ends[0] <= change && change <= ends[1], "{ends:?} around {change}");
            assert!(ends[1] / ends[0] < 1.025, "{ends:?}");
            found.push(ends[1]);
        }
        assert_eq!(found[0], found[1]);
    }
}
