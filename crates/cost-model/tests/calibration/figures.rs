//! The published figures as kernels and seconds.

use narrows_cost_model::Prices;
use narrows_plan::kernel::{Collective, CollectiveKind, Gemm, Kernel};
use narrows_plan::mesh::{Axis, Group};
use narrows_plan::{Bytes, DType};
use serde_json::Value;

/// One measured number: the kernels that ran one after the other, and the time they took.
pub struct Figure {
    pub name: String,
    pub kernels: Vec<Kernel>,
    pub seconds: f64,
}

impl Figure {
    /// The predicted time, in seconds.
    pub fn price(&self, prices: &Prices) -> f64 {
        self.kernels.iter().map(|kernel| prices.kernel(kernel).0).sum()
    }

    /// price / measured − 1.
    pub fn error(&self, prices: &Prices) -> f64 {
        self.price(prices) / self.seconds - 1.0
    }
}

/// The figures by table.
pub struct Figures {
    pub products: Vec<Figure>,
    pub utilisation: Vec<Figure>,
    pub grouped_products: Vec<Figure>,
    pub all_reduces: Vec<Figure>,
    pub grouped_all_reduces: Vec<Figure>,
}

const SEQUENCES: [u64; 4] = [1, 2, 4, 8];
const LABELS: [&str; 6] =
    ["fullrank_attn", "fullrank_mlp", "vanilla_attn", "vanilla_mlp", "btp_attn", "btp_mlp"];

pub fn load() -> Figures {
    let data: Value = serde_json::from_str(include_str!("../data/boost-a100.json")).unwrap();
    Figures {
        products: products(&data["gemm_ms"]),
        utilisation: utilisation(&data),
        grouped_products: grouped_products(&data["grouping_us"]),
        all_reduces: all_reduces(&data["all_reduce_ms"]),
        grouped_all_reduces: grouped_all_reduces(&data["grouping_us"]),
    }
}

pub fn product(m: u64, k: u64, n: u64, batch: u64) -> Kernel {
    let (input, output) = (DType::Bf16, DType::Bf16);
    Kernel::Gemm(Gemm { m, n, k, batch, accumulate: false, input, output })
}

pub fn all_reduce(mib: u64) -> Kernel {
    Kernel::Collective(Collective {
        kind: CollectiveKind::AllReduce,
        payload: Bytes(mib * Bytes::MIB),
        group: Group { axis: Axis::Tensor, size: 4, stride: 1 },
    })
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn integers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

/// The [m, k, n] of a label, at four sequences.
fn shapes(gemm_ms: &Value, label: &str) -> Vec<[u64; 3]> {
    let products = gemm_ms[label]["products"].as_array().unwrap();
    products.iter().map(|shape| integers(shape).try_into().unwrap()).collect()
}

fn products(gemm_ms: &Value) -> Vec<Figure> {
    let figure = |label: &&str| Figure {
        name: label.to_string(),
        kernels: shapes(gemm_ms, label).iter().map(|&[m, k, n]| product(m, k, n, 1)).collect(),
        seconds: gemm_ms[label]["ms"].as_f64().unwrap() * 1e-3,
    };
    LABELS.iter().map(figure).collect()
}

fn utilisation(data: &Value) -> Vec<Figure> {
    let percent = &data["gemm_utilisation_percent_of_312_tflops_by_sequences"];
    let mut figures = Vec::new();
    for label in LABELS {
        for (sequences, percent) in SEQUENCES.into_iter().zip(numbers(&percent[label])) {
            let shapes = shapes(&data["gemm_ms"], label);
            let scaled = shapes.iter().map(|&[m, k, n]| [m / 4 * sequences, k, n]);
            let flops: f64 =
                scaled.clone().map(|shape| 2.0 * shape.iter().product::<u64>() as f64).sum();
            figures.push(Figure {
                name: format!("{label} ×{sequences}"),
                kernels: scaled.map(|[m, k, n]| product(m, k, n, 1)).collect(),
                seconds: flops / (312e12 * percent / 100.0),
            });
        }
    }
    figures
}

/// Grouped: one product with concatenated A, and one batched product for B.
fn grouped_products(us: &Value) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (label, pairs, width) in [("qkv_products", 3, 1024), ("gate_up_products", 2, 2752)] {
        let pair = [product(16_384, 1024, 1024, 1), product(16_384, 1024, width, 1)];
        let one = [product(16_384, 1024, 1024 * pairs, 1), product(16_384, 1024, width, pairs)];
        let separate = pair.iter().cycle().take(2 * pairs as usize).cloned().collect();
        for (how, kernels) in [("separate", separate), ("grouped", one.to_vec())] {
            let seconds = us[label][how].as_f64().unwrap() * 1e-6;
            figures.push(Figure { name: format!("{label} {how}"), kernels, seconds });
        }
    }
    figures
}

fn all_reduces(ms: &Value) -> Vec<Figure> {
    let mut figures = Vec::new();
    for label in ["fullrank", "vanilla", "btp"] {
        let payloads = integers(&ms[label]["payloads_mib_per_sequence"]);
        for (sequences, ms) in SEQUENCES.into_iter().zip(numbers(&ms[label]["ms"])) {
            figures.push(Figure {
                name: format!("{label} ×{sequences}"),
                kernels: payloads.iter().map(|mib| all_reduce(mib * sequences)).collect(),
                seconds: ms * 1e-3,
            });
        }
    }
    figures
}

fn grouped_all_reduces(us: &Value) -> Vec<Figure> {
    let mut figures = Vec::new();
    for label in ["qkv_all_reduce", "gate_up_all_reduce"] {
        let mib = us[label]["payload_mib"].as_u64().unwrap();
        let calls = us[label]["calls_separate"].as_u64().unwrap();
        for (how, calls) in [("separate", calls), ("grouped", 1)] {
            figures.push(Figure {
                name: format!("{label} {how}"),
                kernels: vec![all_reduce(mib / calls); calls as usize],
                seconds: us[label][how].as_f64().unwrap() * 1e-6,
            });
        }
    }
    figures
}
