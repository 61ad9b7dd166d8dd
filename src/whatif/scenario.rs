//! The base request of a sweep, and the requests of its points.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};

use narrows_cost_model::{Profile, profile, scale_measurements};
use narrows_plan::model::{self, Model};
use narrows_plan::{Defect, json};
use narrows_planner::{MemoryLimit, Objective, Request};
use serde_json::Value;

use crate::args::{PlanningArgs, RequestArgs, TrainingRunArgs, flags, set_flag, validate};
use crate::defaults::RequestDefaults;
use crate::errors::{CommandResult, Failure, Problem};
use crate::input;
use crate::output;
use crate::step_cost::priced_terms;

use super::document::Document;
use super::field::{SweepField, field_names};
use super::point::{Point, SweepAxis};
use super::values::parse_values;

/// A base request whose fields can be set.
#[derive(Debug)]
pub struct Scenario {
    args: PlanningArgs,
    training_run: TrainingRunArgs,
    /// Models by `--model`, as typed.
    models: HashMap<OsString, (Document, Model)>,
    /// Profiles by `--hardware`, as typed.
    profiles: HashMap<OsString, (Document, Profile)>,
}

impl Scenario {
    /// Reads the models and profiles of the base request and of sweeps of `model` and `hardware`, and parses the
    /// sweeps, which are values of a flag: `FIELD=VALUES`.
    ///
    /// # Errors
    /// Inputs that cannot be read, unknown fields, and values that are no list.
    pub fn new(
        mut args: PlanningArgs,
        training_run: TrainingRunArgs,
        (flag, sweeps): (&str, &[String]),
    ) -> CommandResult<(Scenario, Vec<SweepAxis>)> {
        let mut typed = vec![];
        for sweep in sweeps {
            let Some((name, values)) = sweep.split_once('=') else {
                let problem = Problem::new(flag, format!("`{sweep}` has no `=`"));
                return Err(Failure::input(problem.hint("FIELD=VALUES such as devices=8..64*2")));
            };
            let values =
                parse_values(values).map_err(|problem| Failure::input(problem.at(flag)))?;
            typed.push((name.trim(), values));
        }
        let names_of = |field: &str| -> Vec<OsString> {
            let axes = typed.iter().filter(|(name, _)| *name == field);
            axes.flat_map(|(_, values)| values).map(|value| text_of(value).into()).collect()
        };
        let (models, profiles) = (names_of("model"), names_of("hardware"));
        let inputs = &mut args.request.model;
        inputs.model = inputs.model.take().or_else(|| models.first().cloned());
        inputs.model = Some(inputs.model_name(&DEFAULTS)?);
        let hardware = inputs.hardware.take().or_else(|| profiles.first().cloned());
        inputs.hardware = Some(hardware.unwrap_or_else(|| DEFAULTS.hardware.into()));
        let (read_models, read_profiles) = (HashMap::new(), HashMap::new());
        let mut scenario =
            Scenario { args, training_run, models: read_models, profiles: read_profiles };
        for argument in models.into_iter().chain(scenario.args.request.model.model.clone()) {
            scenario.models.insert(argument.clone(), read_model(&argument)?);
        }
        for argument in profiles.into_iter().chain(scenario.args.request.model.hardware.clone()) {
            scenario.profiles.insert(argument.clone(), read_profile(&argument)?);
        }
        let mut axes: Vec<SweepAxis> = vec![];
        for (name, values) in typed {
            let field = SweepField::parse(name, scenario.model(), scenario.hardware())
                .map_err(|problem| Failure::input(problem.at(flag)))?;
            let is_void = |axis: &&SweepAxis| field.replaces(&axis.field, scenario.model());
            if let Some(axis) = axes.iter().find(is_void) {
                let message = match axis.field == field {
                    true => format!("`{name}` is swept twice"),
                    false => format!("`{name}` replaces every value of `{}`", axis.field),
                };
                let problem = Problem::new(flag, message);
                return Err(Failure::input(problem.hint("one --sweep with all values")));
            }
            if field == SweepField::Rank
                && let Some(value) = values.iter().find(|value| value.as_u64().is_none())
            {
                let message = format!("{value} is not a whole number from 1, as ranks are");
                return Err(Failure::input(Problem::new(flag, message).hint("rank=32..256*2")));
            }
            axes.push(SweepAxis { field, values });
        }
        for axis in &axes {
            scenario.confirm_effect(&axis.field, &axes).map_err(|p| Failure::input(p.at(flag)))?;
        }
        Ok((scenario, axes))
    }

    /// Confirms that no flag replaces the value of a field in every point of a sweep over `axes`.
    ///
    /// # Errors
    /// A flag that is set in place of the field. The problem has no location.
    pub fn confirm_effect(&self, field: &SweepField, axes: &[SweepAxis]) -> Result<(), Problem> {
        let set = |name: &&str| self.sets_flag(name, axes);
        field.flags_in_its_place().find(set).map_or(Ok(()), |name| {
            let message = format!("`{field}` has no effect, because --{name} is set");
            Err(Problem::new("", message).hint("one of the two"))
        })
    }

    /// Whether a flag that replaces a number of the profile is set in every point.
    fn sets_flag(&self, flag: &str, axes: &[SweepAxis]) -> bool {
        let is_of_flag =
            |axis: &&SweepAxis| matches!(&axis.field, SweepField::Flag(swept) if swept == flag);
        match axes.iter().find(is_of_flag) {
            // With `auto`, the memory of the profile is the limit.
            Some(axis) => !axis.values.iter().any(|value| text_of(value) == "auto"),
            None if flag == "memory-limit" => {
                self.args.request.memory.memory_limit != MemoryLimit::Auto
            }
            None => self.training_run.price_per_device_hour.is_some(),
        }
    }

    /// Whether a value is the least that its field takes: 1 of a number that counts things.
    pub fn is_least(&self, field: &SweepField, value: &Value) -> bool {
        let zero = || self.point(vec![], &[(field.clone(), Value::from(0))]);
        value.as_u64() == Some(1)
            && !self.is_continuous(field)
            && zero().and_then(|point| validate(&point.request)).is_err()
    }

    /// Confirms that a number lies within the range of the flag that it sets, whatever else is set.
    ///
    /// # Errors
    /// A number that no request takes. The problem has no location.
    pub fn confirm_range(&self, field: &SweepField, value: &Value) -> Result<(), Problem> {
        let SweepField::Flag(flag) = field else { return Ok(()) };
        if !value.is_number() {
            return Ok(());
        }
        // A value that a flag cannot take is refused with its point.
        let Ok(request) = self.request(&[(field.clone(), value.clone())]) else { return Ok(()) };
        let location = format!("--{flag}");
        let mut problems = request.sizes_out_of_range().into_iter().map(Problem::in_request);
        problems.find(|problem| problem.location == location).map_or(Ok(()), Err)
    }

    /// Names of all fields, with their help texts or present values.
    pub fn field_names(&self) -> Vec<(String, String)> {
        field_names(self.model(), self.hardware())
    }

    /// The profiles of all points, before fields are set.
    pub fn profiles(&self) -> impl Iterator<Item = &Profile> {
        self.profiles.values().map(|(_, profile)| profile)
    }

    /// The request with the fields set, not validated.
    ///
    /// # Errors
    /// A value that the field does not take.
    pub fn request(&self, settings: &[(SweepField, Value)]) -> CommandResult<Request> {
        let mut args = self.args.clone();
        for (flag, value) in flags_in(settings) {
            if !is_flag_of_run(flag) {
                set_flag(&mut args, flag, &text_of(value))?;
            }
        }
        let model = self.model_with(&args.request, settings)?;
        let profile = self.profile_with(&args.request, settings)?;
        Ok(args.request(&DEFAULTS, model, profile))
    }

    /// The point with the fields set: its request, not validated, and the training run to estimate.
    ///
    /// # Errors
    /// A value that the field does not take, and an incomplete training run.
    pub fn point(
        &self,
        values: Vec<Value>,
        settings: &[(SweepField, Value)],
    ) -> CommandResult<Point> {
        let request = self.request(settings)?;
        let run = self.training_run_args(settings)?;
        // The least cost is compared with the cost under other objectives.
        let sets_objective = flags_in(settings).any(|(flag, _)| flag == "objective");
        let reports_cost = sets_objective || request.objective == Objective::Cost;
        let terms = run.resolve(reports_cost)?;
        let training_run = terms.map(|terms| priced_terms(terms, &request.profile));
        let price_per_device_hour = run.price(&request.profile);
        Ok(Point { values, request, training_run, reports_cost, price_per_device_hour })
    }

    /// The flags of the training run with the fields set.
    fn training_run_args(
        &self,
        settings: &[(SweepField, Value)],
    ) -> CommandResult<TrainingRunArgs> {
        let mut args = self.training_run.clone();
        for (flag, value) in flags_in(settings) {
            if is_flag_of_run(flag) {
                set_flag(&mut args, flag, &text_of(value))?;
            }
        }
        Ok(args)
    }

    fn model_with(
        &self,
        args: &RequestArgs,
        settings: &[(SweepField, Value)],
    ) -> CommandResult<Model> {
        let argument = args.model.model.as_deref().unwrap_or_default();
        let (document, model) = &self.models[argument];
        let mut document = document.clone();
        let mut is_changed = false;
        for (field, value) in settings {
            match field {
                SweepField::Model(path) => {
                    set_field(&mut document, field, path, value.clone())?;
                }
                SweepField::Rank if document.set_everywhere("rank", value) == 0 => {
                    let message = format!("`{}` has no factor pairs", document.name);
                    let problem = Problem::new("--sweep rank", message);
                    return Err(Failure::input(problem.hint("a low-rank model such as cola-7b")));
                }
                SweepField::Rank => {}
                _ => continue,
            }
            is_changed = true;
        }
        let model = match is_changed {
            true => input::read_model(&document.name, &document.value.to_string())
                .map_err(|failure| set_by(failure, settings))?,
            false => model.clone(),
        };
        // The question "how long would a step of longer sequences take" does not ask what the model was trained for.
        let sets_length = |(field, _): &(SweepField, Value)| matches!(field, SweepField::Flag(flag) if flag == "sequence-length");
        let sequence_length = args.sequence_length.filter(|_| settings.iter().any(sets_length));
        let max_sequence_length =
            model.max_sequence_length.max(sequence_length.unwrap_or_default());
        Ok(Model { max_sequence_length, ..model })
    }

    fn profile_with(
        &self,
        args: &RequestArgs,
        settings: &[(SweepField, Value)],
    ) -> CommandResult<Profile> {
        let argument = args.model.hardware.as_deref().unwrap_or_default();
        let (document, profile) = &self.profiles[argument];
        let fields = settings.iter().filter_map(|(field, value)| match field {
            SweepField::Hardware(hardware) => Some((field, hardware, value)),
            _ => None,
        });
        let mut changed: Option<Document> = None;
        for (typed, field, value) in fields {
            let document = changed.get_or_insert_with(|| document.clone());
            let scaled = value.as_f64().filter(|_| field.factor != 1.0);
            let is_whole = document.is_whole(&field.path);
            let value = match scaled.map(|value| field.in_profile_unit(value, is_whole)) {
                Some(Value::Null) => {
                    let problem =
                        Problem::new(format!("--sweep {typed}"), format!("{value} is too large"));
                    return Err(Failure::input(problem));
                }
                scaled => scaled.unwrap_or_else(|| value.clone()),
            };
            set_field(document, typed, &field.path, value)?;
            document.drop_refits_of(&field.path);
        }
        let Some(document) = changed else { return Ok(profile.clone()) };
        let defective = |defects| set_by(Failure::file(&document.name, defects), settings);
        let changed = profile::read(&document.value.to_string());
        let changed = changed.map_err(defective)?;
        if changed.file().measured.is_none() {
            return Ok(changed);
        }
        // Kernels were measured on the hardware as it is, not on the changed one.
        let mut file = changed.file().clone();
        scale_measurements(
            &mut file,
            profile.file(),
            args.executor.map(Into::into).unwrap_or_default(),
        );
        file.resolve().map_err(defective)
    }

    /// The field called `name`.
    ///
    /// # Errors
    /// No field has this name. The problem has no location.
    pub fn field(&self, name: &str) -> Result<SweepField, Problem> {
        SweepField::parse(name, self.model(), self.hardware())
    }

    /// Reads the models and profiles that settings name.
    ///
    /// # Errors
    /// Inputs that cannot be read.
    pub fn read_inputs_of(&mut self, settings: &[(SweepField, Value)]) -> CommandResult<()> {
        for (flag, value) in flags_in(settings) {
            let argument = OsString::from(text_of(value));
            if flag == "model" && !self.models.contains_key(&argument) {
                let model = read_model(&argument)?;
                self.models.insert(argument, model);
            } else if flag == "hardware" && !self.profiles.contains_key(&argument) {
                let profile = read_profile(&argument)?;
                self.profiles.insert(argument, profile);
            }
        }
        Ok(())
    }

    /// Whether a field takes every number between two.
    pub fn is_continuous(&self, field: &SweepField) -> bool {
        let hardware = match field {
            SweepField::Hardware(hardware) => hardware,
            // Rounding to whole bytes changes no plan.
            SweepField::Flag(flag) => return flag == "memory-limit",
            _ => return false,
        };
        let document = self.hardware();
        hardware.factor != 1.0
            || (document.number(&hardware.path).is_some() && !document.is_whole(&hardware.path))
    }

    /// Whether a field is a whole number of the profile, in its own unit.
    pub fn is_whole(&self, field: &SweepField) -> bool {
        let SweepField::Hardware(hardware) = field else { return false };
        hardware.factor == 1.0 && self.hardware().is_whole(&hardware.path)
    }

    /// The scenario with the sizes of a request in place of defaults, some of which depend on each other.
    pub fn with_sizes_of(mut self, request: &Request) -> Scenario {
        self.args.request.devices = Some(request.devices);
        self.args.request.global_batch = Some(request.global_batch);
        self.args.request.sequence_length = Some(request.sequence_length);
        self
    }

    /// The model of the base request.
    pub fn model(&self) -> &Document {
        &self.models[self.args.request.model.model.as_deref().unwrap_or_default()].0
    }

    /// The profile of the base request.
    pub fn hardware(&self) -> &Document {
        &self.profiles[self.args.request.model.hardware.as_deref().unwrap_or_default()].0
    }
}

const DEFAULTS: RequestDefaults = RequestDefaults::PLAN;

/// The settings of flags.
fn flags_in(settings: &[(SweepField, Value)]) -> impl Iterator<Item = (&str, &Value)> {
    settings.iter().filter_map(|(field, value)| match field {
        SweepField::Flag(flag) => Some((&**flag, value)),
        _ => None,
    })
}

/// Whether a flag describes the training run instead of the request.
fn is_flag_of_run(flag: &str) -> bool {
    flags::<TrainingRunArgs>().iter().any(|(known, _)| known == flag)
}

/// The failure of a document that settings have changed: with the settings, and without positions in its text, since the
/// document is no file of the user.
fn set_by(failure: Failure, settings: &[(SweepField, Value)]) -> Failure {
    let in_documents = settings.iter().filter(|(field, _)| !matches!(field, SweepField::Flag(_)));
    let typed = in_documents.map(|(field, value)| format!("{field}={}", text_of(value)));
    let typed = typed.collect::<Vec<_>>().join(", ");
    let in_words = |problem: Problem| {
        let message = json::without_position(&problem.message).to_owned();
        let hint = format!(
            "{typed} was set; `narrows whatif --list` shows the present value of every field"
        );
        Problem { message, ..problem }.hint(hint)
    };
    Failure { problems: failure.problems.into_iter().map(in_words).collect(), ..failure }
}

fn read_model(argument: &OsStr) -> CommandResult<(Document, Model)> {
    let (name, text) = input::model_text(argument)?;
    input::warn_of_ignored_fields(&name, &text);
    let model = input::read_model(&name, &text)?;
    let mut document = document(name, &text)?;
    // Hugging Face configs have another form, whose optional fields are not known.
    if document.value.get("format").is_some() {
        document.schema = model::schema();
    }
    Ok((document, model))
}

fn read_profile(argument: &OsStr) -> CommandResult<(Document, Profile)> {
    let profile = input::profile(argument)?;
    let text = output::json_text(profile.file())?;
    let document = document(argument.to_string_lossy().into_owned(), &text)?;
    Ok((Document { schema: profile::schema(), ..document }, profile))
}

fn document(name: String, text: &str) -> CommandResult<Document> {
    let invalid = |defect: Defect| Failure::input(Problem::in_file(&name, defect));
    let value = json::read(text).map_err(invalid)?;
    Ok(Document { name, value, schema: Value::Null })
}

/// Sets a field of the model or profile of one point, which may be another one than that of the base request.
fn set_field(
    document: &mut Document,
    field: &SweepField,
    path: &str,
    value: Value,
) -> CommandResult<()> {
    if document.set(path, value) {
        return Ok(());
    }
    let message = format!("`{}` has no such field", document.name);
    let problem = Problem::new(format!("--sweep {field}"), message);
    Err(Failure::input(problem.hint("a field that all swept models and profiles have")))
}

/// A value as it would be typed.
pub fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        _ => value.to_string(),
    }
}
