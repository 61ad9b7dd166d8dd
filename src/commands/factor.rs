//! `narrows factor`: makes a low-rank model from a dense one by singular value decomposition.

use narrows_plan::Defects;
use narrows_plan::model::ModelFile;
use narrows_runtime::interchange::{WeightFormat, factor_weights, write_weights};

use crate::args::{Detail, FactorArgs, FactorSettings};
use crate::errors::{CommandResult, Failure};
use crate::output;
use crate::report::{self, FactorReport};
use crate::weight_files::{create_folder, read_weights, write_text};

/// Writes the factors and the file of the low-rank model into a new folder.
pub fn run(args: &FactorArgs) -> CommandResult<()> {
    let FactorSettings { weights, model, choice, output } = args.resolve()?;
    let dense = read_weights(weights, &model)?;
    let mut factored = factor_weights(&model, dense, choice)
        .map_err(|defect| Failure::file(&model.name, Defects::single(defect)))?;
    factored.model.name = format!("{}-low-rank", model.name);
    let file = output.join("model.json");
    create_folder(output)?;
    let written =
        write_weights(output, &factored.model, &factored.weights, WeightFormat::HuggingFace)
            .map_err(Failure::weights)?;
    write_text(&file, &output::json_text(&ModelFile::from(&factored.model))?)?;
    let report = FactorReport::new(&model, &factored, &written, &file);
    report::print(&report, args.format.format, Detail::Summary, false)
}
