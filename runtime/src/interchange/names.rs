//! Names of tensors, by format.
//!
//! CoLA-M divides a block between its activation checkpoints, so that a factor lies in another module than
//! its counterpart, and B of `down` in the next block:
//!
//! | factors | module in block N |
//! |---|---|
//! | A of q, k, v; of o | `pre_attn`; `self_attn` |
//! | B of q, k, v; of o | `self_attn`; `post_attn` |
//! | A of gate, up; of down | `pre_mlp`; `self_mlp` |
//! | B of gate, up | `self_mlp` |
//! | B of down | `last_layer_post_mlp` of block N + 1, or `post_mlp` of the last block |

use narrows_plan::Defect;
use narrows_plan::model::{LinearKind, Model, ParameterId, Weight, WeightId};

use super::boost;
use super::format::WeightFormat;
use super::fused;
use super::layout::FileTensor;
use crate::checkpoint::{StoredParameter, stored_parameters};

/// The tensors of a model in files of this format.
///
/// # Errors
/// A parameter for which the format has no name.
pub(super) fn file_tensors(model: &Model, format: WeightFormat) -> Result<Vec<FileTensor>, Defect> {
    for (index, block) in model.blocks.iter().enumerate() {
        let extra = block.vectors_beside_linears().filter(|_| format != WeightFormat::HuggingFace);
        if let Some(extra) = extra {
            let problem = format!("has {extra}, for which the {format} format has no names");
            return Err(Defect::new(format!("layer {index}"), problem));
        }
    }
    match format {
        WeightFormat::HuggingFace => {
            Ok(stored_parameters(model).into_iter().map(FileTensor::single).collect())
        }
        WeightFormat::ColaM => {
            require_factor_pairs(model, format)?;
            Ok(renamed(model, |id| cola_m_name(id, model.blocks.len() as u64)))
        }
        WeightFormat::Loro => {
            require_no_crossing(model, format)?;
            Ok(renamed(model, loro_name))
        }
        WeightFormat::Nanotron => {
            require_no_crossing(model, format)?;
            boost::file_tensors(model)
        }
        WeightFormat::Phi3 => {
            require_dense(model, format)?;
            Ok(fused::phi3_tensors(model))
        }
        WeightFormat::InternLm2 => {
            require_dense(model, format)?;
            Ok(fused::internlm2_tensors(model))
        }
    }
}

/// The tensors of checkpoints, with other names for factors: `name_of` returns the rest of the name after
/// `model.layers.`, and whether the file holds the transpose.
fn renamed(
    model: &Model,
    name_of: impl Fn(ParameterId) -> Option<(String, bool)>,
) -> Vec<FileTensor> {
    let tensors = stored_parameters(model).into_iter().map(|stored| {
        FileTensor::single(match name_of(stored.parameter.id) {
            Some((name, transposed)) => {
                StoredParameter { name: format!("model.layers.{name}"), transposed, ..stored }
            }
            None => stored,
        })
    });
    tensors.collect()
}

fn loro_name(id: ParameterId) -> Option<(String, bool)> {
    let (linear, tensor, transposed) = match id.weight {
        WeightId::FactorA(linear) => (linear, "weight_in", false),
        WeightId::FactorB(linear) => (linear, "weight_out", true),
        _ => return None,
    };
    let module = if linear.is_attention() { "self_attn" } else { "mlp" };
    Some((format!("{}.{module}.{linear}_proj.{tensor}", id.block?), transposed))
}

fn cola_m_name(id: ParameterId, blocks: u64) -> Option<(String, bool)> {
    use LinearKind::{Down, Gate, K, O, Q, Up, V};
    let block = id.block?;
    let name = match id.weight {
        WeightId::FactorA(linear) => {
            let module = match linear {
                Q | K | V => "pre_attn",
                O => "self_attn",
                Gate | Up => "pre_mlp",
                Down => "self_mlp",
            };
            format!("{block}.{module}.pre_{linear}_proj.cola_a")
        }
        WeightId::FactorB(linear) => {
            let (block, module) = match linear {
                Q | K | V => (block, "self_attn"),
                O => (block, "post_attn"),
                Gate | Up => (block, "self_mlp"),
                Down if block + 1 == blocks => (block, "post_mlp"),
                Down => (block + 1, "last_layer_post_mlp"),
            };
            format!("{block}.{module}.post_{linear}_proj.cola_b")
        }
        _ => return None,
    };
    Some((name, false))
}

/// Refuses models with a latent crossing, for whose gates and norms only CoLA's names have an extension.
fn require_no_crossing(model: &Model, format: WeightFormat) -> Result<(), Defect> {
    let crosses = |weight: &Weight| matches!(weight, Weight::Pair(pair) if pair.crossing.is_some());
    match find_linear(model, crosses) {
        Some(place) => Err(Defect::new(
            place,
            format!("has a latent crossing, for which the {format} format has no names"),
        )),
        None => Ok(()),
    }
}

fn require_factor_pairs(model: &Model, format: WeightFormat) -> Result<(), Defect> {
    require_no_crossing(model, format)?;
    match find_linear(model, |weight| *weight == Weight::Dense) {
        Some(place) => Err(Defect::new(
            place,
            format!("is dense, and the {format} format has factor pairs only"),
        )),
        None => Ok(()),
    }
}

fn require_dense(model: &Model, format: WeightFormat) -> Result<(), Defect> {
    match find_linear(model, |weight| *weight != Weight::Dense) {
        Some(place) => {
            let problem =
                format!("is a factor pair, and the {format} format has dense linears only");
            Err(Defect::new(place, problem).hint("`narrows factor` on the dense weights"))
        }
        None => Ok(()),
    }
}

/// Place of the first linear with such a weight, such as `layer 3 q`.
fn find_linear(model: &Model, is_found: impl Fn(&Weight) -> bool) -> Option<String> {
    model.blocks.iter().enumerate().find_map(|(index, block)| {
        let linears = block.linears().into_iter();
        let mut found = linears.filter(|(_, linear)| is_found(&linear.weight));
        found.next().map(|(kind, _)| format!("layer {index} {kind}"))
    })
}
