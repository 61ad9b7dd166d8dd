//! The golden cases: tiny models, their weights and tokens, and the results of PyTorch.

use std::num::NonZeroU64;
use std::path::Path;

use narrows_plan::model::{self, Model};
use narrows_reference::{Batch, Float, Matrix, Parameters, Reference};
use narrows_runtime::{CounterRng, FactorRateScale, Loro, Optimizer, random_stream_name};
use serde_json::Value;

pub const NAMES: [&str; 28] = [
    "llama",
    "cola",
    "svd",
    "lax-paper-identity",
    "lax-paper-dense",
    "lax-paper-tensor",
    "lax-released-identity",
    "lax-released-dense",
    "lax-released-tensor",
    "lax-mixed",
    "lax-paper-affine",
    "lax-released-affine",
    "padding",
    "padding-tied",
    "rope-partial",
    "rope-llama3",
    "rope-yarn",
    "rope-none",
    "rope-long",
    "bias-dense",
    "bias-pairs",
    "qk-norm-dense",
    "qk-norm-pairs",
    "window-dense",
    "window-pairs",
    "loro",
    "loro-scale",
    "dlr",
];

/// One file of `tests/golden`.
pub struct GoldenCase {
    pub name: &'static str,
    pub model: Model,
    microbatches: Vec<Microbatch>,
    file: Value,
}

struct Microbatch {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    sequences: usize,
    length: usize,
}

impl GoldenCase {
    pub fn read(name: &'static str) -> GoldenCase {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let path = folder.join(format!("{name}.json"));
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file: Value = serde_json::from_str(&text).expect("JSON");
        let model = model::read(name, &file["model"].to_string())
            .unwrap_or_else(|defects| panic!("{name}: {defects}"));
        let ids = |value: &Value| numbers(value).into_iter().map(|id| id as u32).collect();
        let microbatches = file["microbatches"].as_array().expect("microbatches");
        let microbatches = microbatches
            .iter()
            .map(|batch| Microbatch {
                tokens: ids(&batch["tokens"]),
                targets: ids(&batch["targets"]),
                sequences: number(&batch["sequences"]) as usize,
                length: number(&batch["length"]) as usize,
            })
            .collect();
        GoldenCase { name, model, microbatches, file }
    }

    pub fn all() -> impl Iterator<Item = GoldenCase> {
        NAMES.into_iter().map(GoldenCase::read)
    }

    pub fn value(&self, key: &str) -> &Value {
        &self.file[key]
    }

    /// Initial weights with noise, equal to those of `make.py`.
    pub fn weights<T: Float>(&self) -> Parameters<T> {
        let seed = number(self.value("seed")) as u64;
        let noise = number(self.value("noise"));
        Parameters::from_fn(&self.model, |parameter| {
            let initial = parameter.initial_value(seed);
            let stream =
                CounterRng::new(seed, &format!("{} noise", random_stream_name(parameter.id)));
            let columns = parameter.columns;
            move |row, column| {
                let (row, column) = (row as u64, column as u64);
                T::from_f64(initial(row, column) + noise * stream.normal(row * columns + column))
            }
        })
    }

    pub fn reference<T: Float>(&self) -> Reference<T> {
        Reference::new(&self.model, self.weights())
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    pub fn microbatches(&self) -> Vec<Batch<'_>> {
        self.microbatches
            .iter()
            .map(|m| Batch {
                tokens: &m.tokens,
                targets: &m.targets,
                sequences: m.sequences,
                length: m.length,
            })
            .collect()
    }

    pub fn optimizer(&self) -> Optimizer {
        let value = |key: &str| number(&self.value("optimizer")[key]);
        let (warm_up, total) = (value("warm_up_steps") as u64, value("total_steps") as u64);
        let clip_norm = value("clip_norm");
        let loro = self.value("optimizer").get("loro").map(|loro| Loro {
            exact_every: NonZeroU64::new(number(&loro["exact_every"]) as u64).expect("not 0"),
            refresh_every: number(&loro["refresh_every"]) as u64,
            rate_scale: loro["rate_scale"]
                .as_f64()
                .map_or(FactorRateScale::RankOverHidden, FactorRateScale::Constant),
        });
        // Weight decay of LORO's code differs, and is 0 in its scripts.
        let base = Optimizer::new(value("peak_learning_rate"), warm_up, total);
        let decay = self.value("optimizer").get("weight_decay").map(number);
        let default = if loro.is_some() { 0.0 } else { base.weight_decay };
        let weight_decay = decay.unwrap_or(default);
        Optimizer { clip_norm, weight_decay, loro, ..base }
    }
}

pub fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("a number, not {value}"))
}

pub fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(number).collect()
}

/// The elements of a list of lists, row after row.
pub fn rows(value: &Value) -> Vec<f64> {
    value.as_array().expect("rows").iter().flat_map(numbers).collect()
}

pub fn elements<T: Float>(matrix: &Matrix<T>) -> Vec<f64> {
    matrix.elements().iter().map(|x| x.to_f64().expect("a float")).collect()
}

pub fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}
