//! Differences between the functions that two models compute with the same weights.

use serde::Serialize;
use serde_json::Value;

use super::{LinearKind, Model, Weight};

/// A field in which two models differ, so that equal weights compute different functions.
#[derive(Clone, Debug, PartialEq)]
pub struct FunctionDifference {
    /// The field, by its names in model files.
    pub field: String,
    /// Values of the two models, as JSON.
    pub values: [String; 2],
    /// Whether weights are adapted to the other value on purpose, as to longer sequences.
    pub is_adaptation: bool,
}

impl Model {
    /// The differences from the function of another model whose parameters have the same names and shapes. Fields of initial
    /// values and of training alone are no part of the function.
    ///
    /// ```
    /// let trained = narrows_plan::model::presets::find("cola-tiny").unwrap();
    /// let mut model = trained.clone();
    /// model.norm_epsilon *= 10.0;
    /// model.initial_std *= 2.0;
    /// let differences = model.function_differences(&trained);
    /// assert_eq!(differences.len(), 1);
    /// assert_eq!((differences[0].field.as_str(), differences[0].is_adaptation), ("norm_epsilon", false));
    /// ```
    pub fn function_differences(&self, other: &Model) -> Vec<FunctionDifference> {
        let mut found = Differences::default();
        let both = [self, other];
        found.compare("heads", both.map(|model| model.heads), false);
        found.compare("kv_heads", both.map(|model| model.kv_heads), false);
        found.compare("norm_epsilon", both.map(|model| model.norm_epsilon), false);
        if self.has_latent_norms() {
            found.compare(
                "latent_norm_epsilon",
                both.map(|model| model.latent_norm_epsilon),
                false,
            );
        }
        found.compare("rotary_dim", both.map(|model| model.rope.dim), false);
        found.compare("rope_theta", both.map(|model| model.rope.theta), true);
        found.compare("rope_scaling", both.map(|model| &model.rope.scaling), true);
        if self.max_sequence_length > other.max_sequence_length {
            found.compare("max_sequence_length", both.map(|model| model.max_sequence_length), true);
        }
        for (index, blocks) in self.blocks.iter().zip(&other.blocks).enumerate() {
            let blocks = [blocks.0, blocks.1];
            let field = |name: &str| format!("blocks[{index}].{name}");
            found.compare(&field("product"), blocks.map(|block| block.product), false);
            found.compare(&field("positions"), blocks.map(|block| block.positions), false);
            found.compare(&field("attention"), blocks.map(|block| block.attention), true);
            for kind in LinearKind::ALL {
                let weights = blocks.map(|block| &block.linear(kind).weight);
                let [Weight::Pair(own), Weight::Pair(others)] = weights else { continue };
                let name = |part: &str| field(&format!("{kind}.{part}"));
                found.compare(&name("activation"), [own.activation, others.activation], false);
                found.compare(&name("crossing"), [&own.crossing, &others.crossing], false);
            }
            // The other blocks mostly differ alike.
            if found.0.iter().any(|difference| difference.field.starts_with("blocks[")) {
                break;
            }
        }
        found.0
    }
}

#[derive(Default)]
struct Differences(Vec<FunctionDifference>);

impl Differences {
    fn compare<T: Serialize>(&mut self, field: &str, values: [T; 2], is_adaptation: bool) {
        let [own, others] = values.map(|value| serde_json::to_value(value).unwrap_or_default());
        if own != others {
            let text =
                |value: Value| if value.is_null() { "none".into() } else { value.to_string() };
            let values = [text(own), text(others)];
            self.0.push(FunctionDifference { field: field.to_owned(), values, is_adaptation });
        }
    }
}
