//! Threads and number format of GEMMs.

use narrows_runtime::GemmDtype;

use super::parallel::Parallel;

/// Threads of a kernel with GEMMs, and the number format to which it rounds their operands.
#[derive(Clone, Copy, Debug)]
pub struct GemmMode {
    /// Threads.
    pub parallel: Parallel,
    /// Format of operands. bf16 needs a processor that [`supports_bf16`].
    pub dtype: GemmDtype,
}

impl From<Parallel> for GemmMode {
    fn from(parallel: Parallel) -> GemmMode {
        GemmMode { parallel, dtype: GemmDtype::F32 }
    }
}

/// Whether this processor multiplies bf16 numbers: AVX512_BF16, of Intel's Cooper Lake and of Xeons since Sapphire Rapids, and of
/// AMD's processors since Zen 4.
pub fn supports_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    let supported = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    let supported = false;
    supported
}
