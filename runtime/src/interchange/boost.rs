//! Tensors of Nanotron's LLaMA and of BOOST's low-rank LLaMA, which group linears with the same input.
//!
//! | tensor of block N, after `model.decoder.N.pp_block.` | shape | parameters |
//! |---|---|---|
//! | `attn.qkv_proj0.weight` | 3·r, hidden | A of q, k, v |
//! | `attn.qkv_proj1.weight` | 3, d_out, r | B of q, k, v |
//! | `attn.q_proj1.weight`, `kv_proj1.weight` with fewer KV heads | d_out, r; 2, d_out, r | the same |
//! | `attn.o_proj0.weight`, `o_proj1.weight` | r, d_in; hidden, r | A and B of o |
//! | `mlp.gate_up_proj0.weight`, `gate_up_proj1.weight` | 2·r, hidden; 2, d_ff, r | gate, up |
//! | `mlp.down_proj0.weight`, `down_proj1.weight` | r, d_ff; hidden, r | A and B of down |
//! | `attn.qkv_proj.weight`, `o_proj.weight` (dense) | d_out, d_in | q, k, v; o |
//! | `mlp.gate_up_proj.weight`, `down_proj.weight` (dense) | d_out, d_in | gate, up; down |
//!
//! All are (out, in), as torch's `Linear` has them. B of several linears is a batch of matrices.

use std::collections::BTreeMap;

use narrows_plan::Defect;
use narrows_plan::model::{Block, LinearKind, Model, ParameterId, WeightId};

use super::layout::{FileTensor, TensorPart};
use crate::parameters::{LogicalParameter, ParameterKind, logical_parameters};

/// Arrangement of the matrices in a tensor.
#[derive(Clone, Copy, PartialEq)]
enum Stacking {
    /// One below the other in one matrix.
    Rows,
    /// A batch of matrices of equal shape.
    Batch,
}

/// The tensors of a model without crossings.
///
/// # Errors
/// A block with dense and low-rank linears, or with different ranks in one group.
pub(super) fn file_tensors(model: &Model) -> Result<Vec<FileTensor>, Defect> {
    let parameters: BTreeMap<ParameterId, LogicalParameter> =
        logical_parameters(model).into_iter().map(|parameter| (parameter.id, parameter)).collect();
    let mut tensors = vec![];
    for (id, parameter) in &parameters {
        let prefix = id.block.map_or(String::new(), block_prefix);
        let (name, transposed) = match id.weight {
            WeightId::Embedding => {
                ("model.token_position_embeddings.pp_block.token_embedding.weight", false)
            }
            WeightId::FinalNorm => ("model.final_layer_norm.pp_block.weight", false),
            WeightId::Head => ("model.lm_head.pp_block.weight", true),
            WeightId::Norm1 => ("input_layernorm.weight", false),
            WeightId::Norm2 => ("post_attention_layernorm.weight", false),
            _ => continue,
        };
        let part = TensorPart { parameter: parameter.clone(), transposed };
        tensors.push(stack(format!("{prefix}{name}"), vec![part], Stacking::Rows));
    }
    for (index, block) in model.blocks.iter().enumerate() {
        let grouped = model.kv_heads < model.heads;
        for (name, weights, stacking) in block_tensors(index as u64, block, grouped)? {
            let part = |weight: &WeightId| {
                let id = ParameterId { block: Some(index as u64), weight: *weight };
                TensorPart { parameter: parameters[&id].clone(), transposed: true }
            };
            let name = format!("{}{name}.weight", block_prefix(index as u64));
            tensors.push(stack(name, weights.iter().map(part).collect(), stacking));
        }
    }
    Ok(tensors)
}

fn block_prefix(block: u64) -> String {
    format!("model.decoder.{block}.pp_block.")
}

type BlockTensor = (&'static str, Vec<WeightId>, Stacking);

/// Names, weights and stacking of the linears of a block; `grouped` is grouped-query attention.
fn block_tensors(index: u64, block: &Block, grouped: bool) -> Result<Vec<BlockTensor>, Defect> {
    use LinearKind::{Down, Gate, K, O, Q, Up, V};
    use Stacking::{Batch, Rows};
    let low_rank = block.q.rank().is_some();
    for (kind, linear) in block.linears() {
        if linear.rank().is_some() != low_rank {
            let problem =
                "is dense or low-rank unlike q, and blocks of Nanotron are one or the other";
            return Err(Defect::new(format!("layer {index} {kind}"), problem));
        }
    }
    for group in [&[Q, K, V][..], &[Gate, Up][..]] {
        let first = block.linear(group[0]).rank();
        if let Some(kind) = group.iter().find(|kind| block.linear(**kind).rank() != first) {
            let problem = format!("has another rank than {}, whose tensor it shares", group[0]);
            return Err(Defect::new(format!("layer {index} {kind}"), problem));
        }
    }
    if !low_rank {
        let dense = |linears: &[LinearKind]| linears.iter().copied().map(WeightId::Dense).collect();
        return Ok(vec![
            ("attn.qkv_proj", dense(&[Q, K, V]), Rows),
            ("attn.o_proj", dense(&[O]), Rows),
            ("mlp.gate_up_proj", dense(&[Gate, Up]), Rows),
            ("mlp.down_proj", dense(&[Down]), Rows),
        ]);
    }
    let a = |linears: &[LinearKind]| linears.iter().copied().map(WeightId::FactorA).collect();
    let b = |linears: &[LinearKind]| linears.iter().copied().map(WeightId::FactorB).collect();
    let mut tensors = vec![("attn.qkv_proj0", a(&[Q, K, V]), Rows)];
    if grouped {
        tensors.push(("attn.q_proj1", b(&[Q]), Rows));
        tensors.push(("attn.kv_proj1", b(&[K, V]), Batch));
    } else {
        tensors.push(("attn.qkv_proj1", b(&[Q, K, V]), Batch));
    }
    tensors.extend([
        ("attn.o_proj0", a(&[O]), Rows),
        ("attn.o_proj1", b(&[O]), Rows),
        ("mlp.gate_up_proj0", a(&[Gate, Up]), Rows),
        ("mlp.gate_up_proj1", b(&[Gate, Up]), Batch),
        ("mlp.down_proj0", a(&[Down]), Rows),
        ("mlp.down_proj1", b(&[Down]), Rows),
    ]);
    Ok(tensors)
}

fn stack(name: String, parts: Vec<TensorPart>, stacking: Stacking) -> FileTensor {
    let matrix = |TensorPart { parameter, transposed }: &TensorPart| match transposed {
        true => (parameter.columns, parameter.rows),
        false => (parameter.rows, parameter.columns),
    };
    let (rows, columns) = matrix(&parts[0]);
    let shape = match (stacking, parts[0].parameter.kind) {
        (_, ParameterKind::Vector) => vec![columns],
        (Stacking::Batch, _) => vec![parts.len() as u64, rows, columns],
        (Stacking::Rows, _) => vec![parts.iter().map(|part| matrix(part).0).sum(), columns],
    };
    FileTensor { name, shape, parts, slices: 1 }
}
