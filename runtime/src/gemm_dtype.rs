//! Number format of the operands of GEMMs on backends that store f32.

use serde::{Deserialize, Serialize};

/// Number format to which a backend that stores f32 rounds the operands of GEMMs. Products are accumulated in f32, and all
/// else, attention included, is f32. Programs in mixed bf16, which store bf16, do not round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmDtype {
    /// As stored.
    #[default]
    F32,
    /// To the nearest bf16, ties to even.
    Bf16,
}

impl GemmDtype {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            GemmDtype::F32 => "f32",
            GemmDtype::Bf16 => "bf16",
        }
    }
}
