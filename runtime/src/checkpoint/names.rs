//! Names and shapes of logical parameters in the files of a checkpoint.
//!
//! | logical name | name in the file | shape in the file |
//! |---|---|---|
//! | `embedding` | `model.embed_tokens.weight` | vocab, hidden |
//! | `layer N norm1` | `model.layers.N.input_layernorm.weight` | hidden |
//! | `layer N norm2` | `model.layers.N.post_attention_layernorm.weight` | hidden |
//! | `layer N q` (dense) | `model.layers.N.self_attn.q_proj.weight` | d_out, d_in |
//! | `layer N q.a` | `model.layers.N.self_attn.q_proj.cola_a` | d_in, r |
//! | `layer N q.b` | `model.layers.N.self_attn.q_proj.cola_b` | r, d_out |
//! | `layer N q.bias` | `model.layers.N.self_attn.q_proj.bias` | d_out |
//! | `layer N q.norm` | `model.layers.N.self_attn.q_norm.weight` | head_dim |
//! | `layer N q.gate` | `model.layers.N.self_attn.q_proj.lax_gate` | r_prev, r |
//! | `layer N q.gate.bias` | `model.layers.N.self_attn.q_proj.lax_gate_bias` | r |
//! | `layer N q.gate.u`, `.v` | `model.layers.N.self_attn.q_proj.lax_gate_u`, `_v` | a, a; b, b |
//! | `layer N q.latent_norm.scale` | `model.layers.N.self_attn.q_proj.lax_norm.weight` | r |
//! | `layer N q.latent_norm.bias` | `model.layers.N.self_attn.q_proj.lax_norm.bias` | r |
//! | `final_norm` | `model.norm.weight` | hidden |
//! | `head`, unless tied | `lm_head.weight` | vocab, hidden |
//!
//! Likewise for k, v, o (`self_attn`) and gate, up, down (`mlp`). Dense matrices and the head, which
//! are (in, out) in memory, are (out, in) in the file, as torch's `Linear` has them; all other
//! parameters have the same layout. All factor pairs have CoLA's names, whatever is between the
//! factors.

use narrows_plan::model::{LinearKind, Model, ParameterId, WeightId};

use crate::parameters::{LogicalParameter, ParameterKind, logical_parameters};

/// A parameter in the files of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredParameter {
    /// The logical parameter.
    pub parameter: LogicalParameter,
    /// Name in the file.
    pub name: String,
    /// Whether the file holds the transpose.
    pub transposed: bool,
}

impl StoredParameter {
    /// Shape in the file.
    pub fn shape(&self) -> Vec<u64> {
        let LogicalParameter { rows, columns, kind, .. } = self.parameter;
        match (kind, self.transposed) {
            (ParameterKind::Vector, _) => vec![columns],
            (ParameterKind::Matrix, false) => vec![rows, columns],
            (ParameterKind::Matrix, true) => vec![columns, rows],
        }
    }
}

/// All parameters of a model, as its checkpoints hold them.
pub fn stored_parameters(model: &Model) -> Vec<StoredParameter> {
    let parameters = logical_parameters(model).into_iter();
    let stored = parameters.map(|parameter| {
        let (name, transposed) = stored_name(parameter.id);
        StoredParameter { parameter, name, transposed }
    });
    stored.collect()
}

/// Name of a parameter in a checkpoint file, and whether the file has its transpose.
fn stored_name(parameter: ParameterId) -> (String, bool) {
    let of_linear = |linear: LinearKind, tensor: &str| {
        let module = if linear.is_attention() { "self_attn" } else { "mlp" };
        format!("{module}.{linear}_proj.{tensor}")
    };
    let name = match parameter.weight {
        WeightId::Embedding => "embed_tokens.weight".to_owned(),
        WeightId::FinalNorm => "norm.weight".to_owned(),
        WeightId::Head => return ("lm_head.weight".to_owned(), true),
        WeightId::Norm1 => "input_layernorm.weight".to_owned(),
        WeightId::Norm2 => "post_attention_layernorm.weight".to_owned(),
        WeightId::Dense(linear) => of_linear(linear, "weight"),
        WeightId::FactorA(linear) => of_linear(linear, "cola_a"),
        WeightId::FactorB(linear) => of_linear(linear, "cola_b"),
        WeightId::Bias(linear) => of_linear(linear, "bias"),
        WeightId::QkNorm(linear) => format!("self_attn.{linear}_norm.weight"),
        WeightId::CrossingGate(linear) => of_linear(linear, "lax_gate"),
        WeightId::CrossingGateBias(linear) => of_linear(linear, "lax_gate_bias"),
        WeightId::CrossingGateU(linear) => of_linear(linear, "lax_gate_u"),
        WeightId::CrossingGateV(linear) => of_linear(linear, "lax_gate_v"),
        WeightId::LatentNormScale(linear) => of_linear(linear, "lax_norm.weight"),
        WeightId::LatentNormBias(linear) => of_linear(linear, "lax_norm.bias"),
    };
    let transposed = matches!(parameter.weight, WeightId::Dense(_));
    match parameter.block {
        Some(block) => (format!("model.layers.{block}.{name}"), transposed),
        None => (format!("model.{name}"), transposed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use narrows_plan::model::presets;
    use std::collections::BTreeSet;

    #[test]
    fn stored_names_are_unique() {
        for name in ["llama-60m", "cola-tiny", "cola-1b", "svd-130m", "lax-60m"] {
            let model = presets::find(name).unwrap();
            let stored = stored_parameters(&model);
            let names: BTreeSet<_> = stored.iter().map(|stored| &stored.name).collect();
            assert_eq!(names.len(), stored.len(), "{name}");
            assert_eq!(names.iter().any(|name| name.contains("lm_head")), !model.tied, "{name}");
            for stored in &stored {
                let elements: u64 = stored.shape().iter().product();
                assert_eq!(elements, stored.parameter.elements(), "{}", stored.name);
            }
        }
    }

    #[test]
    fn shapes_equal_those_of_hugging_face() {
        let shape = |model: &str, name: &str| {
            let stored = stored_parameters(&presets::find(model).unwrap());
            stored.iter().find(|stored| stored.name == name).map(StoredParameter::shape)
        };
        let llama_shape = |name| shape("llama-60m", name).unwrap();
        assert_eq!(llama_shape("model.embed_tokens.weight"), [32000, 512]);
        assert_eq!(llama_shape("lm_head.weight"), [32000, 512]);
        assert_eq!(llama_shape("model.layers.7.mlp.gate_proj.weight"), [1376, 512]);
        assert_eq!(llama_shape("model.layers.0.input_layernorm.weight"), [512]);
        assert_eq!(shape("cola-60m", "model.layers.0.mlp.down_proj.cola_a"), Some(vec![1376, 128]));
        assert_eq!(shape("cola-60m", "model.layers.0.mlp.down_proj.cola_b"), Some(vec![128, 512]));
    }
}
