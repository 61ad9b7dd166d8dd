//! Report on exported weights.

use std::path::Path;

use narrows_plan::model::Model;
use serde::Serialize;

use super::Report;
use super::page::Page;
use crate::args::Detail;
use crate::text::{plural, thousands};

/// Output of `export-weights`.
#[derive(Serialize)]
pub struct ExportWeightsReport {
    model: String,
    weights: String,
    config: String,
    /// Files of the tokenizer beside them.
    tokenizer: Vec<String>,
    parameters: u64,
    /// Factor pairs that became dense matrices.
    folded_pairs: u64,
}

impl ExportWeightsReport {
    /// The report on the weights of a model that were written for a class, folded or not, with files of a tokenizer.
    pub fn new(
        (model, written): (&Model, &Model),
        weights: &Path,
        config: &Path,
        tokenizer: Vec<String>,
    ) -> ExportWeightsReport {
        let pairs = |model: &Model| -> u64 {
            let ranks = model.blocks.iter().flat_map(|block| block.linears());
            ranks.filter(|(_, linear)| linear.rank().is_some()).count() as u64
        };
        ExportWeightsReport {
            model: model.name.clone(),
            weights: weights.display().to_string(),
            config: config.display().to_string(),
            tokenizer,
            parameters: written.parameters(),
            folded_pairs: pairs(model) - pairs(written),
        }
    }
}

impl Report for ExportWeightsReport {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        page.heading(format!("Weights of {}", self.model));
        let mut fields = vec![
            ("weights", format!("{} parameters in {}", thousands(self.parameters), self.weights)),
            ("config", self.config.clone()),
        ];
        if !self.tokenizer.is_empty() {
            fields.push(("tokenizer", self.tokenizer.join(", ")));
        }
        if self.folded_pairs > 0 {
            let pairs = plural(self.folded_pairs, "factor pair");
            fields.push(("folded", format!("{pairs} into dense matrices")));
        }
        page.fields(&fields);
        page
    }
}
