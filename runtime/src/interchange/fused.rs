//! Tensors of Phi-3 and InternLM2, which have dense linears with the same input in one tensor.
//!
//! | tensor of block N, after `model.layers.N.` | shape | parameters |
//! |---|---|---|
//! | `self_attn.qkv_proj.weight` (Phi-3) | d_q + 2·d_kv, hidden | q, then k, then v |
//! | `mlp.gate_up_proj.weight` (Phi-3) | 2·d_ff, hidden | gate, then up |
//! | `attention.wqkv.weight` (InternLM2) | d_q + 2·d_kv, hidden | for each KV head: its heads of q, its k, its v |
//! | `attention.wo.weight`, `feed_forward.w1`, `w3`, `w2` (InternLM2) | d_out, d_in | o; gate, up, down |
//!
//! Phi-3's other names are those of LLaMA. InternLM2 has other names for all but the last norm.

use narrows_plan::model::{LinearKind, Model, ParameterId, WeightId};

use super::layout::FileTensor;
use crate::checkpoint::stored_parameters;

/// InternLM2's name of the embedding.
pub(super) const TOKEN_EMBEDDINGS: &str = "model.tok_embeddings.weight";

/// The tensors of a dense model under Phi-3's names.
pub(super) fn phi3_tensors(model: &Model) -> Vec<FileTensor> {
    stacked(model, |ParameterId { block, weight }| {
        let tensor = match weight {
            WeightId::Dense(LinearKind::Q | LinearKind::K | LinearKind::V) => "self_attn.qkv_proj",
            WeightId::Dense(LinearKind::Gate | LinearKind::Up) => "mlp.gate_up_proj",
            _ => return None,
        };
        Some(format!("model.layers.{}.{tensor}.weight", block?))
    })
}

/// The tensors of a dense model under InternLM2's names.
pub(super) fn internlm2_tensors(model: &Model) -> Vec<FileTensor> {
    let mut tensors = stacked(model, |ParameterId { block, weight }| {
        let tensor = match weight {
            WeightId::Embedding => return Some(TOKEN_EMBEDDINGS.to_owned()),
            WeightId::Head => return Some("output.weight".to_owned()),
            WeightId::Norm1 => "attention_norm",
            WeightId::Norm2 => "ffn_norm",
            WeightId::Dense(linear) => match linear {
                LinearKind::Q | LinearKind::K | LinearKind::V => "attention.wqkv",
                LinearKind::O => "attention.wo",
                LinearKind::Gate => "feed_forward.w1",
                LinearKind::Up => "feed_forward.w3",
                LinearKind::Down => "feed_forward.w2",
            },
            _ => return None,
        };
        Some(format!("model.layers.{}.{tensor}.weight", block?))
    });
    for tensor in tensors.iter_mut().filter(|tensor| tensor.parts.len() > 1) {
        tensor.slices = model.kv_heads;
    }
    tensors
}

/// The tensors of checkpoints under other names, where `name_of` returns one. Parameters with the same name are
/// stacked along their rows in the file, in the order of the forward pass.
fn stacked(model: &Model, name_of: impl Fn(ParameterId) -> Option<String>) -> Vec<FileTensor> {
    let mut tensors: Vec<FileTensor> = vec![];
    for stored in stored_parameters(model) {
        let mut tensor = FileTensor::single(stored);
        if let Some(name) = name_of(tensor.parts[0].parameter.id) {
            tensor.name = name;
        }
        match tensors.last_mut().filter(|last| last.name == tensor.name) {
            Some(last) => {
                last.shape[0] += tensor.shape[0];
                last.parts.append(&mut tensor.parts);
            }
            None => tensors.push(tensor),
        }
    }
    tensors
}
