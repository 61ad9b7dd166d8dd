//! The answer of `whatif --break-even`.

use indexmap::IndexSet;
use narrows_planner::Objective;
use schemars::JsonSchema;
use serde::Serialize;

use super::page::{Align, Cell, Page};
use crate::field_name::FieldName;
use crate::whatif::{BreakEvenRegion, FasterAlternative, SweepAxis, gap_phrase, short, text_of};

/// Values of a field at which one of two alternatives overtakes the other.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct BreakEvenReport {
    /// The field.
    field: FieldName,
    /// The alternatives: the first and the second one.
    between: [String; 2],
    /// Quantity by which alternatives are compared, whichever objective chose their plans: `step_time_s`.
    compared: &'static str,
    /// Objectives of the plans, other than the step time.
    #[serde(skip)]
    objectives: Vec<&'static str>,
    /// The faster alternative by values, in ascending order.
    regions: Vec<BreakEvenRegion>,
    /// The gaps between regions: each has the values that enclose a break-even point.
    break_even: Vec<[f64; 2]>,
}

impl BreakEvenReport {
    /// The answer for two axes: the field and its two alternatives, planned under these objectives.
    pub fn new(
        axes: &[SweepAxis; 2],
        regions: Vec<BreakEvenRegion>,
        objectives: impl Iterator<Item = Objective>,
    ) -> BreakEvenReport {
        let break_even =
            regions.windows(2).map(|pair| [pair[0].values[1], pair[1].values[0]]).collect();
        let name = |index: usize| axes[1].values.get(index).map(text_of).unwrap_or_default();
        let between = [name(0), name(1)];
        let others = objectives.filter(|objective| *objective != Objective::StepTime);
        let objectives: IndexSet<&str> = others.map(Objective::name).collect();
        BreakEvenReport {
            field: axes[0].field.field_name(),
            between,
            compared: "step_time_s",
            objectives: objectives.into_iter().collect(),
            regions,
            break_even,
        }
    }

    /// The answer in words.
    pub fn verdict(&self) -> String {
        let clauses =
            self.regions.iter().enumerate().map(|(index, region)| {
                format!("{} {}.", self.claim(region.faster), self.place(index))
            });
        let mut sentences: Vec<String> = clauses.collect();
        if self.regions.len() == 1 {
            sentences.push("There is no break-even point among these values.".into());
        }
        if !self.objectives.is_empty() {
            sentences.push(format!(
                "Step times are compared, of plans for the objective {}.",
                self.objectives.join(" or ")
            ));
        }
        sentences.join(" ")
    }

    /// The table of all values. Each row has the value, the step time and the plan of both
    /// alternatives, and the difference.
    pub fn table(&self, page: &mut Page, rows: &[[Cell; 6]]) {
        let name = self.field.as_str();
        let name = name.rsplit('.').next().unwrap_or(name).replace('_', " ");
        let columns = [
            (name.as_str(), Align::Right),
            ("A", Align::Right),
            ("plan of A", Align::Left),
            ("B", Align::Right),
            ("plan of B", Align::Left),
            ("B − A", Align::Right),
        ];
        page.heading("Step times");
        page.table(&columns, &rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>());
        let [first, second] = &self.between;
        page.paragraph(&format!("A: {first}. B: {second}."));
    }

    fn claim(&self, faster: FasterAlternative) -> String {
        let [first, second] = &self.between;
        match faster {
            FasterAlternative::FirstFaster => format!("{first} is faster than {second}"),
            FasterAlternative::SecondFaster => format!("{second} is faster than {first}"),
            FasterAlternative::Equal => format!("{first} and {second} are equally fast"),
            FasterAlternative::OnlyFirst => format!("Only {first} has a plan, and {second} none,"),
            FasterAlternative::OnlySecond => format!("Only {second} has a plan, and {first} none,"),
            FasterAlternative::NoPlan => format!("Neither {first} nor {second} has a plan"),
        }
    }

    /// Place of a region in words: between the middles of the gaps around it.
    fn place(&self, index: usize) -> String {
        let name = self.field.short();
        let values = self.regions.iter().flat_map(|region| region.values);
        let unit = self.field.unit().of_axis(values);
        let scaled = |values: [f64; 2]| values.map(|value| unit.scaled(value));
        let boundary =
            |gap: usize| Some(gap_phrase(scaled(*self.break_even.get(gap)?), unit.symbol()));
        let below = index.checked_sub(1).and_then(boundary);
        match (below, boundary(index)) {
            (None, Some(above)) => format!("below {above} of {name}"),
            (Some(below), None) => format!("above {below} of {name}"),
            (Some(below), Some(above)) => format!("from {below} to {above} of {name}"),
            (None, None) => {
                let ([low, high], symbol) = (scaled(self.regions[index].values), unit.symbol());
                let range = format!("from {} to {} {symbol}", short(low), short(high));
                format!("at every planned value, {} of {name}", range.trim_end())
            }
        }
    }
}
