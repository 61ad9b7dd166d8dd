//! Alternatives whose step times are compared: strategies, forms of parallelism, or any settings.

use narrows_plan::strategy::Baseline;
use serde_json::Value;

use crate::errors::{CommandResult, Failure, Problem};

use super::field::SweepField;
use super::scenario::Scenario;
use super::values::scalar;

/// A restriction of the request under a name.
#[derive(Clone, Debug)]
pub struct BreakEvenAlternative {
    /// The name as typed.
    pub name: String,
    /// The fields that it sets.
    pub settings: Vec<(SweepField, Value)>,
}

/// Forms of parallelism along one axis of the mesh: name, and the axes that have one device.
const PURE: [(&str, [&str; 3]); 3] = [
    ("data-parallel", ["tensor", "context", "pipeline"]),
    ("tensor-parallel", ["context", "pipeline", "data_parallel"]),
    ("pipeline-parallel", ["tensor", "context", "data_parallel"]),
];

impl BreakEvenAlternative {
    /// Parses terms separated by `+`: a strategy, `data-parallel`, `tensor-parallel`, `pipeline-parallel`, or
    /// FIELD=VALUE. Reads models and profiles that it names.
    ///
    /// # Errors
    /// A word that is none of these, an unknown field, and inputs that cannot be read.
    pub fn parse(text: &str, scenario: &mut Scenario) -> CommandResult<BreakEvenAlternative> {
        let mut settings = vec![];
        for term in text.split('+').map(str::trim) {
            let of_term = term_settings(term, scenario);
            settings.extend(of_term.map_err(|problem| Failure::input(problem.at("--between")))?);
        }
        for (index, (field, _)) in settings.iter().enumerate() {
            if settings[..index]
                .iter()
                .any(|(earlier, _)| field.replaces(earlier, scenario.model()))
            {
                let message = format!("`{text}` sets {field} twice");
                return Err(Failure::input(Problem::new("--between", message)));
            }
        }
        scenario.read_inputs_of(&settings)?;
        Ok(BreakEvenAlternative { name: text.trim().to_owned(), settings })
    }
}

/// The settings of a term. A problem has no location.
fn term_settings(term: &str, scenario: &Scenario) -> Result<Vec<(SweepField, Value)>, Problem> {
    if let Some((field, value)) = term.split_once('=') {
        return Ok(vec![(scenario.field(field.trim())?, scalar(value.trim()))]);
    }
    if let Some((_, axes)) = PURE.iter().find(|(name, _)| *name == term) {
        return axes.iter().map(|axis| Ok((scenario.field(axis)?, Value::from(1)))).collect();
    }
    if Baseline::from_name(term).is_some() {
        return Ok(vec![(scenario.field("strategy")?, Value::from(term))]);
    }
    let strategies = Baseline::ALL.map(Baseline::name).into_iter();
    let names: Vec<&str> = strategies.chain(PURE.iter().map(|(name, _)| *name)).collect();
    let problem = Problem::new("", format!("`{term}` is not an alternative"));
    Err(problem.hint(names.join(", ")).hint("or settings such as tensor=8+strategy=btp"))
}
