//! Report on factored weights.

use std::path::Path;

use narrows_plan::model::{LinearKind, Model};
use narrows_runtime::interchange::FactoredModel;
use serde::Serialize;

use super::Report;
use super::page::{Align, Page};
use crate::args::Detail;
use crate::text::thousands;

/// Output of `factor`.
#[derive(Serialize)]
pub struct FactorReport {
    model: String,
    weights: String,
    model_file: String,
    /// Files of the tokenizer beside them.
    tokenizer: Vec<String>,
    dense_parameters: u64,
    parameters: u64,
    linears: Vec<LinearReport>,
}

/// A linear, and what its factors lose.
#[derive(Serialize)]
struct LinearReport {
    block: u64,
    linear: &'static str,
    /// `null` where the linear stays dense.
    rank: Option<u64>,
    /// ‖W − A·B‖/‖W‖ in the Frobenius norm.
    relative_error: f64,
}

impl FactorReport {
    /// The report on a model that was factored, and the files that were written: weights and model, and those of a tokenizer.
    pub fn new(
        dense: &Model,
        factored: &FactoredModel,
        (weights, model_file): (&Path, &Path),
        tokenizer: Vec<String>,
    ) -> FactorReport {
        let linears = factored.linears.iter().map(|linear| LinearReport {
            block: linear.block,
            linear: linear.kind.name(),
            rank: linear.rank,
            relative_error: linear.relative_error,
        });
        FactorReport {
            model: factored.model.name.clone(),
            weights: weights.display().to_string(),
            model_file: model_file.display().to_string(),
            tokenizer,
            dense_parameters: dense.parameters(),
            parameters: factored.model.parameters(),
            linears: linears.collect(),
        }
    }

    /// Appends a table with a row for each layer, and `cell` of each linear that has a rank.
    fn table(&self, page: &mut Page, cell: impl Fn(&LinearReport, u64) -> String) {
        let names = LinearKind::ALL.map(|kind| (kind.name(), Align::Right));
        let columns: Vec<_> = [("layer", Align::Right)].into_iter().chain(names).collect();
        let rows = self.linears.chunks(LinearKind::ALL.len()).map(|block| {
            let cells = block
                .iter()
                .map(|linear| linear.rank.map_or("dense".to_owned(), |rank| cell(linear, rank)));
            [block[0].block.to_string()].into_iter().chain(cells).collect::<Vec<String>>()
        });
        page.table(&columns, &rows.collect::<Vec<_>>());
    }
}

impl Report for FactorReport {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        page.heading(format!("Factors of {}", self.model));
        let parameters = [self.parameters, self.dense_parameters].map(thousands);
        let mut fields =
            vec![("weights", self.weights.clone()), ("model", self.model_file.clone())];
        if !self.tokenizer.is_empty() {
            fields.push(("tokenizer", self.tokenizer.join(", ")));
        }
        fields.push(("parameters", format!("{} of {} dense", parameters[0], parameters[1])));
        page.fields(&fields);
        page.heading("Rank of each linear");
        self.table(&mut page, |_, rank| thousands(rank));
        page.heading("Relative error of each linear");
        self.table(&mut page, |linear, _| format!("{:.3}", linear.relative_error));
        page
    }
}
