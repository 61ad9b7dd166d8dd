//! Places in the messages of a run: the flags that name its files and folders, and the fields of its recipe file.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::errors::{Failure, Problem};

use super::recipe::RecipeArgs;

/// Names of the inputs and outputs of a run.
#[derive(Clone, Debug, Default)]
pub struct RunPlaces {
    /// Files and folders by flag, which is empty for the plan.
    paths: Vec<(&'static str, PathBuf)>,
    recipe: Option<RecipePlace>,
}

/// A recipe file.
#[derive(Clone, Debug)]
struct RecipePlace {
    file: String,
    /// Fields that no flag overrides.
    fields: BTreeSet<String>,
}

impl RunPlaces {
    /// The places of these files and folders.
    pub(super) fn new(
        paths: impl IntoIterator<Item = (&'static str, Option<OsString>)>,
    ) -> RunPlaces {
        let named = |(flag, path): (&'static str, Option<OsString>)| {
            Some((flag, path.filter(|path| !path.is_empty())?.into()))
        };
        let paths = paths.into_iter().filter_map(named);
        RunPlaces { paths: paths.collect(), recipe: None }
    }

    /// Adds a recipe file, whose values `flags` override.
    pub(super) fn with_recipe(
        mut self,
        file: &OsStr,
        recipe: &RecipeArgs,
        flags: &RecipeArgs,
    ) -> RunPlaces {
        let fields = &fields_of(recipe) - &fields_of(flags);
        self.recipe = Some(RecipePlace { file: file.display().to_string(), fields });
        self
    }

    /// The place that sets a value: the flag, or the field of the recipe file that stands for it.
    pub fn name(&self, flag: &str) -> String {
        match self.recipe_field(flag) {
            Some((place, field)) => format!("{place}: {field}"),
            None => flag.to_owned(),
        }
    }

    /// A failure whose problems name the flag or the field that set a value or named a file.
    pub fn locate(&self, mut failure: Failure) -> Failure {
        for problem in &mut failure.problems {
            self.name_flag(problem);
            // Some locations are a flag and its value.
            let (flag, value) = problem.location.split_once(' ').unwrap_or((&problem.location, ""));
            if let Some((place, field)) = self.recipe_field(flag) {
                let within = [field.as_str(), value, &problem.field];
                let within = within.iter().filter(|name| !name.is_empty()).copied();
                problem.field = within.collect::<Vec<_>>().join(": ");
                problem.location = place;
            }
        }
        failure
    }

    /// Names the flag of a file or of its folder, where the location of a problem is one.
    fn name_flag(&self, problem: &mut Problem) {
        let location = Path::new(&problem.location);
        let named = self.paths.iter().filter(|(_, path)| location.starts_with(path));
        if let Some((flag, _)) = named.max_by_key(|(_, path)| path.as_os_str().len())
            && !flag.is_empty()
        {
            problem.location = format!("{flag} {}", problem.location);
        }
    }

    fn recipe_field(&self, flag: &str) -> Option<(String, String)> {
        let recipe = self.recipe.as_ref()?;
        let field = flag.strip_prefix("--")?.replace('-', "_");
        let place = format!("--recipe {}", recipe.file);
        recipe.fields.contains(&field).then_some((place, field))
    }
}

/// Fields of a recipe that are set.
fn fields_of(recipe: &RecipeArgs) -> BTreeSet<String> {
    let fields = match serde_json::to_value(recipe) {
        Ok(Value::Object(fields)) => fields,
        _ => return BTreeSet::new(),
    };
    fields.into_iter().filter(|(_, value)| !value.is_null()).map(|(field, _)| field).collect()
}
