//! Settings of the page, the request that they describe, and why one is refused.

use std::ffi::OsString;
use std::time::Duration;

use axum::Json;
use narrows_cost_model::profile;
use narrows_plan::model::presets;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::args::{PlanningArgs, TrainingRunArgs, TypedFlags, omitted, validate};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::whatif::{Point, Scenario, Sweep, SweepAxis, is_swept, scalar, text_of};

/// Values by the names of fields, as `whatif` lists them.
pub type Settings = Map<String, Value>;

/// Flags of the command line.
#[derive(Debug)]
pub struct PageSettings {
    /// Model that the page begins with; the only file that it may name.
    pub model: OsString,
    /// Hardware, likewise.
    pub hardware: OsString,
    /// Longest time of a search.
    pub time_limit: Option<Duration>,
    /// Flags that the page begins with. The page may drop them: a setting that is not given has its default.
    pub flags: TypedFlags,
}

impl PageSettings {
    /// The settings that the page begins with; `devices` and `global_batch` are those given unless flags set them.
    pub fn first(&self, devices: u64, global_batch: u64) -> Settings {
        let mut first = Settings::new();
        for (flag, value) in self.flags.0.iter().filter(|(flag, _)| is_swept(flag)) {
            let whole = value.parse().map(|value: u64| json!(value));
            first.insert(flag.replace('-', "_"), whole.unwrap_or_else(|_| json!(value)));
        }
        if !first.contains_key("devices") {
            first.insert("devices".into(), json!(devices));
            first.entry("global_batch").or_insert(json!(global_batch));
        }
        first.insert("model".into(), json!(self.model.to_string_lossy()));
        first.insert("hardware".into(), json!(self.hardware.to_string_lossy()));
        first
    }

    /// The request, and the training run to estimate, under some settings. Model and hardware are those of the command
    /// line unless set, and everything else has its default.
    ///
    /// # Errors
    /// Unknown fields, values that a field does not take, and files that the command line does not name.
    pub fn point(&self, settings: &Settings) -> CommandResult<Point> {
        let (scenario, axes) = self.scenario(settings)?;
        if let Some(axis) = axes.iter().find(|axis| axis.values.len() > 1) {
            return Err(several_values(&axis.field.to_string()));
        }
        let mut points = Sweep::Product.points(&scenario, &axes)?;
        let none = || Failure::failed(vec![Problem::new("", "the settings describe no request")]);
        points.pop().ok_or_else(none)
    }

    /// Checks the flags of the command line against each other and, where they are not given, against the values that the page begins
    /// with.
    ///
    /// # Errors
    /// Flags that cannot be planned with. Values of the page that do not suit them are for the page to show.
    pub fn require_valid_flags(&self, first: &Settings) -> CommandResult<()> {
        let is_typed = |problem: &Problem| {
            let of_sweep =
                problem.location.strip_prefix("--sweep ").map(|name| name.replace('_', "-"));
            let flag = of_sweep.as_deref().or(problem.location.strip_prefix("--"));
            self.flags.0.iter().any(|(typed, _)| Some(typed.as_str()) == flag)
        };
        match self.point(first).and_then(|point| validate(&point.request)) {
            Err(failure) if failure.problems.iter().any(is_typed) => Err(failure),
            _ => Ok(()),
        }
    }

    /// Names of the fields that can be set for a model and hardware, with their help texts or present values.
    ///
    /// # Errors
    /// As [`Self::point`].
    pub fn fields(&self, settings: &Settings) -> CommandResult<Vec<(String, String)>> {
        let of_files = |(name, _): &(&String, &Value)| matches!(&***name, "model" | "hardware");
        let settings = settings.iter().filter(of_files);
        let settings = settings.map(|(name, value)| (name.clone(), value.clone())).collect();
        Ok(self.scenario(&settings)?.0.field_names())
    }

    fn scenario(&self, settings: &Settings) -> CommandResult<(Scenario, Vec<SweepAxis>)> {
        let mut planning = omitted::<PlanningArgs>();
        planning.request.time_limit = self.time_limit;
        let inputs = &mut planning.request.model;
        inputs.model = Some(self.model.clone());
        inputs.hardware = Some(self.hardware.clone());
        let mut fields = vec![];
        for (name, value) in settings {
            let is_scalar = value.is_number() || value.is_boolean() || value.is_string();
            if !is_scalar {
                let problem =
                    Problem::new(format!("--sweep {name}"), "is neither a number nor a text");
                return Err(Failure::input(problem));
            }
            // Model and hardware are compared below as they are: no other text may become their name, and no value
            // a list or range, which would take long to enumerate.
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
            if name.is_empty() || !name.chars().all(is_name) {
                let problem = Problem::new(format!("--sweep {name}"), "is not the name of a field");
                return Err(Failure::input(
                    problem.hint("`narrows whatif --list` names all fields"),
                ));
            }
            let text = text_of(value);
            if text.trim().is_empty() {
                let problem = Problem::new(format!("--sweep {name}"), "has no value");
                return Err(Failure::input(problem.hint("without the setting, its default holds")));
            }
            let is_file = matches!(name.as_str(), "model" | "hardware");
            if !is_file && (text.contains(',') || text.contains("..")) {
                return Err(several_values(name));
            }
            match name.as_str() {
                "model" => inputs.model = Some(self.known_model(&text)?),
                "hardware" => inputs.hardware = Some(self.known_hardware(&text)?),
                "rank" if scalar(text.trim()).as_u64().is_none_or(|rank| rank == 0) => {
                    let message = format!("{value} is not a whole number from 1, as ranks are");
                    let problem = Problem::new("--sweep rank", message);
                    return Err(Failure::input(problem.hint("a rank such as 256")));
                }
                _ => fields.push(format!("{name}={text}")),
            }
        }
        Scenario::new(planning, omitted::<TrainingRunArgs>(), ("--sweep", &fields))
    }

    /// A model that the page may name: a preset or the model of the command line. Other names are never opened as files.
    fn known_model(&self, name: &str) -> CommandResult<OsString> {
        let find = |name: &str| presets::find_file(name).map(drop);
        let unknown = |defect| Failure::input(Problem::in_flag("--model", defect));
        match self.model == name {
            true => Ok(name.into()),
            false => find(name).map(|()| name.into()).map_err(unknown),
        }
        .map_err(|failure| with_hint(failure, "a file: `narrows ui --model FILE`"))
    }

    /// As [`Self::known_model`], for hardware.
    fn known_hardware(&self, name: &str) -> CommandResult<OsString> {
        match self.hardware == name {
            true => Ok(name.into()),
            false => profile::preset(name).map(|_| name.into()),
        }
        .map_err(|defects| Failure::flag("--hardware", defects))
        .map_err(|failure| with_hint(failure, "a file: `narrows ui --hardware FILE`"))
    }
}

fn several_values(field: &str) -> Failure {
    let problem = Problem::new(format!("--sweep {field}"), "is more than one value");
    Failure::input(problem.hint("one value; `narrows whatif` takes many"))
}

fn with_hint(failure: Failure, hint: &str) -> Failure {
    let problems = failure.problems.into_iter().map(|problem| problem.hint(hint)).collect();
    Failure { problems, ..failure }
}

/// Reason why settings have no plan.
#[derive(Debug, Serialize)]
pub struct ErrorReport {
    error: PageError,
}

#[derive(Debug, Serialize)]
struct PageError {
    /// `bad_input` or `no_plan`.
    kind: &'static str,
    problems: Vec<PageProblem>,
}

#[derive(Debug, Serialize)]
struct PageProblem {
    /// Name of the field; empty where the problem is that of all fields together.
    field: String,
    message: String,
    causes: Vec<String>,
    hints: Vec<String>,
}

impl From<Failure> for ErrorReport {
    fn from(failure: Failure) -> ErrorReport {
        let kind = match failure.status {
            ExitStatus::BadInput => "bad_input",
            _ => "no_plan",
        };
        let problems = failure.problems.into_iter().map(PageProblem::from).collect();
        ErrorReport { error: PageError { kind, problems } }
    }
}

impl From<Problem> for PageProblem {
    fn from(problem: Problem) -> PageProblem {
        let Problem { location, field: place, message, causes, hints } = problem;
        let message = if place.is_empty() { message } else { format!("{place}: {message}") };
        let sweep = location.strip_prefix("--sweep").map(str::trim_start);
        let flag = || location.strip_prefix("--").map(|flag| flag.replace('-', "_"));
        let field = sweep.map(str::to_owned).or_else(flag).unwrap_or(location);
        PageProblem { field, message, causes, hints }
    }
}

/// The body of an answer that refuses a request for a reason other than its settings.
pub fn refusal(message: impl Into<String>) -> Json<ErrorReport> {
    Json(ErrorReport::from(Failure::input(Problem::new("", message))))
}
