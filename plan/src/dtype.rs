//! Number formats.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Bytes;

/// The number format of a tensor's elements.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// bfloat16, two bytes.
    Bf16,
    /// IEEE single precision, four bytes.
    F32,
    /// Token ids, four bytes.
    U32,
}

impl DType {
    /// Bytes of one element.
    pub fn width(self) -> u64 {
        match self {
            DType::Bf16 => 2,
            DType::F32 | DType::U32 => 4,
        }
    }

    /// Bytes of `elements` elements.
    pub fn bytes(self, elements: u64) -> Bytes {
        Bytes(self.width() * elements)
    }

    /// The name used in programs and plans.
    pub fn name(self) -> &'static str {
        match self {
            DType::Bf16 => "bf16",
            DType::F32 => "f32",
            DType::U32 => "u32",
        }
    }
}

/// Number formats of a run (DESIGN §5). Gradients, master weights, moments and the
/// statistics of norms are always fp32; [`GradReduceDtype`] is the format in which gradients are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// bf16 weights and activations with fp32 master weights (CUDA).
    MixedBf16,
    /// Everything fp32, no separate master copy (CPU).
    #[serde(rename = "full32")]
    Fp32,
}

impl Precision {
    /// The format of weights, activations and activation gradients.
    pub fn compute_dtype(self) -> DType {
        match self {
            Precision::MixedBf16 => DType::Bf16,
            Precision::Fp32 => DType::F32,
        }
    }
}

/// The number format in which gradients are reduced over the replicas. Before the reduction they are accumulated in fp32,
/// after it the norm and the optimizer read them in fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum GradReduceDtype {
    /// As accumulated.
    #[default]
    Fp32,
    /// Rounded to bf16 before the reduction, and summed in bf16. Half the bytes; needs mixed precision.
    Bf16,
}

impl GradReduceDtype {
    /// The format of the operands of the reductions.
    pub fn dtype(self) -> DType {
        match self {
            GradReduceDtype::Fp32 => DType::F32,
            GradReduceDtype::Bf16 => DType::Bf16,
        }
    }

    /// The name in plans and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            GradReduceDtype::Fp32 => "fp32",
            GradReduceDtype::Bf16 => "bf16",
        }
    }

    /// Whether runs of this precision may reduce gradients in this format.
    pub fn suits(self, precision: Precision) -> bool {
        self == GradReduceDtype::Fp32 || precision == Precision::MixedBf16
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == GradReduceDtype::default()
    }
}
