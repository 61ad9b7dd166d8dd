//! `narrows factor`: makes a low-rank model from a dense one by singular value decomposition.

use narrows_plan::Defects;
use narrows_plan::model::ModelFile;
use narrows_runtime::checkpoint::{MODEL_FILE, TokenizerFile};
use narrows_runtime::interchange::{WeightFormat, factor_weights};

use crate::args::{Detail, FactorArgs, FactorSettings, tokenizer_files_of};
use crate::errors::{CommandResult, Failure};
use crate::output;
use crate::report::{self, FactorReport};
use crate::weight_files::WeightFiles;
use crate::weights_folder::WeightsOutput;

/// Writes the factors and the file of the low-rank model into a new folder.
pub fn run(args: &FactorArgs) -> CommandResult<()> {
    let folder = WeightsOutput::prepare(&args.output)?;
    let FactorSettings { weights, model, choice } = args.resolve()?;
    let files = WeightFiles::find(weights)?;
    let tokenizer = files.folder().map_or(Ok(vec![]), tokenizer_files_of)?;
    let dense = files.read(&model).map_err(|mut failure| {
        // The file of the model may be the one that is damaged.
        if let Some(last) = failure.problems.last_mut() {
            last.hints.push(format!("--model is {}", args.model.display()));
        }
        failure
    })?;
    let mut factored = factor_weights(&model, dense, choice)
        .map_err(|defect| Failure::file(&model.name, Defects::single(defect)))?;
    if factored.linears.iter().all(|linear| linear.rank.is_none()) {
        output::warn(
            "no linear became a factor pair, because factors would have as many parameters: the model is dense. \
             A smaller --energy or --rank N makes factors",
        );
    }
    factored.model.name = format!("{}-low-rank", model.name);
    let text = output::json_text(&ModelFile::from(&factored.model))?;
    let (written, file) = folder.write(|folder| {
        let written =
            folder.write_weights(&factored.model, &factored.weights, WeightFormat::HuggingFace)?;
        for TokenizerFile { name, contents } in &tokenizer {
            folder.write_file(name, contents)?;
        }
        Ok((written, folder.write_file(MODEL_FILE, &text)?))
    })?;
    let tokenizer = tokenizer.into_iter().map(|file| file.name).collect();
    let report = FactorReport::new(&model, &factored, (&written, &file), tokenizer);
    report::print(&report, args.format.format, Detail::Summary, false)
}
