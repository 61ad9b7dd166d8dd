//! `narrows export-weights`: writes the weights of a checkpoint for another training code.

use narrows_plan::model::{Activation, ConfigClass, Model, ParameterId, Weight};
use narrows_plan::{Defect, Defects};
use narrows_runtime::checkpoint::{CONFIG_FILE, TokenizerFile};
use narrows_runtime::interchange::{WeightFormat, fold_weights};

use crate::args::{Detail, ExportClassArg, ExportSettings, ExportWeightsArgs, tokenizer_files_of};
use crate::errors::{CommandResult, Failure};
use crate::output;
use crate::report::{self, ExportWeightsReport};
use crate::weight_files::NANOTRON_CONFIG_FILE;
use crate::weights_folder::WeightsOutput;

/// Writes weights and configuration into a new folder.
pub fn run(args: &ExportWeightsArgs) -> CommandResult<()> {
    let folder = WeightsOutput::prepare(&args.output)?;
    let ExportSettings { weights, model, class } = args.resolve()?;
    let target = ExportTarget::new(&model, class)
        .map_err(|defect| Failure::file(&model.name, Defects::single(defect)))?;
    let tokenizer = weights.folder().map_or(Ok(vec![]), tokenizer_files_of)?;
    let weights = weights.read(&model)?;
    let weights = match target.model == model {
        true => weights,
        false => fold_weights(&model, weights).map_err(|id| too_large(&model, id))?,
    };
    let config_file = match target.format {
        WeightFormat::Nanotron => NANOTRON_CONFIG_FILE,
        _ => CONFIG_FILE,
    };
    let config = output::json_text(&target.config)?;
    let (written, config_file) = folder.write(|folder| {
        let written = folder.write_weights(&target.model, &weights, target.format)?;
        for TokenizerFile { name, contents } in &tokenizer {
            folder.write_file(name, contents)?;
        }
        Ok((written, folder.write_file(config_file, &config)?))
    })?;
    let tokenizer = tokenizer.into_iter().map(|file| file.name).collect();
    let report =
        ExportWeightsReport::new((&model, &target.model), &written, &config_file, tokenizer);
    report::print(&report, args.format.format, Detail::Summary, false)
}

fn too_large(model: &Model, id: ParameterId) -> Failure {
    let problem = "the product of its factors exceeds the range of f32";
    let defect = Defect::new(id.to_string(), problem);
    let defect = with_hint_of(ExportClassArg::Cola, defect, model, "--to cola, which has factors");
    Failure::file(&model.name, Defects::single(defect))
}

/// Model, format and configuration that a class loads.
struct ExportTarget {
    /// The model, or its folded counterpart.
    model: Model,
    format: WeightFormat,
    config: serde_json::Value,
}

impl ExportTarget {
    /// The model as it is, where the class has it; else folded, except for CoLA, whose class has factor pairs only.
    fn new(model: &Model, class: ExportClassArg) -> Result<ExportTarget, Defect> {
        let (config_class, format) = match class {
            ExportClassArg::Cola => (ConfigClass::Cola, WeightFormat::HuggingFace),
            ExportClassArg::Llama => (ConfigClass::Llama, WeightFormat::HuggingFace),
            ExportClassArg::Loro => (ConfigClass::Llama, WeightFormat::Loro),
            ExportClassArg::Nanotron => (ConfigClass::Nanotron, WeightFormat::Nanotron),
        };
        let target = |model: Model| {
            let config = model.hugging_face_config(config_class)?;
            Ok(ExportTarget { model, format, config })
        };
        if class == ExportClassArg::Loro {
            require_modules_of_loro(model)?;
            // The ranks are no part of its config.json, which is that of the dense model.
            let config = model.folded()?.hugging_face_config(config_class)?;
            return Ok(ExportTarget { model: model.clone(), format, config });
        }
        match (target(model.clone()), class) {
            (Err(defect), ExportClassArg::Cola) => Err(defect),
            (Err(_), _) if model.is_low_rank() => target(model.folded()?),
            (result, _) => result,
        }
    }
}

/// A defect with a hint of a class, if that class has the model.
fn with_hint_of(class: ExportClassArg, defect: Defect, model: &Model, hint: &str) -> Defect {
    if ExportTarget::new(model, class).is_ok() { defect.hint(hint) } else { defect }
}

/// Refuses what LORO's modules, which are LLaMA's with factor pairs in place of matrices, do not compute.
fn require_modules_of_loro(model: &Model) -> Result<(), Defect> {
    for (index, block) in model.blocks.iter().enumerate() {
        if let Some(extra) = block.vectors_beside_linears() {
            let problem = format!("has {extra}, which LORO's modules do not have");
            let defect = Defect::new(format!("layer {index}"), problem);
            return Err(with_hint_of(ExportClassArg::Llama, defect, model, "--to llama"));
        }
        for (kind, linear) in block.linears() {
            let Weight::Pair(pair) = &linear.weight else { continue };
            let between = match (pair.activation, &pair.crossing) {
                (_, Some(_)) => "a latent crossing",
                (Activation::Silu, None) => "SiLU",
                (Activation::Identity, None) => continue,
            };
            let problem =
                format!("has {between} between its factors, and LORO's modules have nothing there");
            let defect = Defect::new(format!("layer {index} {kind}"), problem);
            return Err(match pair.crossing {
                Some(_) => defect.hint("a checkpoint of `run` keeps it"),
                None => {
                    let hint = "--to cola, whose class has it";
                    with_hint_of(ExportClassArg::Cola, defect, model, hint)
                }
            });
        }
    }
    Ok(())
}
