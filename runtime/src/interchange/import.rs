//! Weights from the files of another training code.

use std::collections::BTreeSet;
use std::path::Path;

use narrows_plan::model::{Model, ParameterId, WeightId};
use narrows_plan::{Defect, Defects};

use super::error::WeightsError;
use super::format::WeightFormat;
use super::layout::FileTensor;
use super::names::file_tensors;
use super::source::WeightSource;
use crate::session::ModelTensors;

/// Defects of one kind that a message lists.
const LISTED_MAX: usize = 8;

/// Name of the head, which a tied model may store too.
fn head_name(format: WeightFormat) -> &'static str {
    match format {
        WeightFormat::InternLm2 => "output.weight",
        _ => "lm_head.weight",
    }
}

/// Weights that were read, and the format of their files.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportedWeights {
    /// The format.
    pub format: WeightFormat,
    /// All parameters of the model.
    pub weights: ModelTensors,
}

/// Reads the weights of a model from a safetensors file, an index of several, or a folder with one of them or
/// with a Nanotron checkpoint. Elements of type F16 and BF16 are converted, exactly.
///
/// # Errors
/// A path that is none of these; every tensor that is missing, that the model lacks, or of another shape; and
/// the first one of another type, or with an element that is not finite.
pub fn import_weights(path: &Path, model: &Model) -> Result<ImportedWeights, WeightsError> {
    let source = WeightSource::open(path)?;
    let format = WeightFormat::of_names(source.names());
    let error = |defects: Defects| WeightsError::new(path, defects);
    let tensors = file_tensors(model, format).map_err(|defect| error(defect.into()))?;
    check(&source, &tensors, model, format).map_err(error)?;
    let mut weights = ModelTensors::new();
    for tensor in &tensors {
        let elements = source.read(&tensor.name).map_err(|defect| error(defect.into()))?;
        if elements.iter().any(|element| !element.is_finite()) {
            let defect = Defect::new(&tensor.name, "has elements that are not finite");
            return Err(error(defect.into()));
        }
        weights.extend(tensor.split(&elements));
    }
    let head_name = head_name(format);
    if model.tied && source.shape(head_name).is_some() {
        let head = source.read(head_name).map_err(|defect| error(defect.into()))?;
        let embedding = ParameterId { block: None, weight: WeightId::Embedding };
        if head != weights[&embedding] {
            let problem = "differs from the embedding, and the model has one weight for both";
            let defect = Defect::new(head_name, problem).hint("\"tie_word_embeddings\": false");
            return Err(error(defect.into()));
        }
    }
    Ok(ImportedWeights { format, weights })
}

/// Checks names and shapes of all tensors.
fn check(
    source: &WeightSource,
    tensors: &[FileTensor],
    model: &Model,
    format: WeightFormat,
) -> Result<(), Defects> {
    let (mut missing, mut misshapen, mut unknown) = (vec![], vec![], vec![]);
    for tensor in tensors {
        match source.shape(&tensor.name) {
            None => missing.push(Defect::new(&tensor.name, "is missing")),
            Some(shape) if shape != tensor.shape => misshapen.push(Defect::new(
                &tensor.name,
                format!("has the shape {shape:?}, and the model's is {:?}", tensor.shape),
            )),
            Some(_) => {}
        }
    }
    let known: BTreeSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    for name in source.names().filter(|name| !known.contains(name)) {
        let is_tied_head = model.tied && name == head_name(format);
        if !is_tied_head && !is_derived(name) {
            let problem = format!("is not a tensor of {} in the {format} format", model.name);
            unknown.push(Defect::new(name, problem));
        }
    }
    let mut defects = Defects::default();
    for kind in [missing, misshapen, unknown] {
        let more = kind.len().saturating_sub(LISTED_MAX);
        kind.into_iter().take(LISTED_MAX).for_each(|defect| defects.push(defect));
        if more > 0 {
            defects.push(Defect::new("", format!("{more} more tensors have the same problem")));
        }
    }
    if let Some(last) = defects.0.last_mut() {
        last.hint = Some("the --model of these weights, such as their config.json".to_owned());
    }
    defects.into_result(())
}

/// Whether a tensor follows from the configuration: older versions of transformers store the frequencies of
/// the rotary embedding.
fn is_derived(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}
