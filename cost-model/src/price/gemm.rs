//! The price of a GEMM.
//!
//! The library cuts C\[m,n\] = A\[m,k\]·B\[k,n\] into tiles of a×b, which U compute units compute in waves of U;
//! with too few tiles to fill the device it also splits the contraction s times (split-K) and sums the parts:
//!
//! ```text
//! waves    = ⌈ ⌈m/a⌉ · ⌈n/b⌉ · batch · s / U ⌉
//! main     = 2ab · ⌈k/s⌉ · o(a,b) · U / (peak · η)      o: operand loads, 1 for the largest tile
//! epilogue = σ · U · ab · w / bandwidth                 w: bytes of an element of C, twice when added to
//! sum      = batch · mn · (4s + w) / (bandwidth · η_mem)     only when s > 1, with parts in fp32
//! compute  = min over tiles and splits of  waves · (main + epilogue) + sum
//! memory   = bytes of A, B and C once / (bandwidth · η_mem)
//! time     = start + max(compute, memory)
//! ```
//! o(a,b) = (1 + λ(1/a + 1/b)) / (1 + λ(1/a* + 1/b*)) grows as a tile reuses its operands less.
//! The epilogue makes skinny GEMMs slow: the main loop is k/(k + k₀) of a tile's time, with
//! k₀ = σ·η·peak·w / 2·bandwidth.
//!
//! Every term is a non-decreasing function of m, n, k and batch for every tile and split, and so is
//! the price: a larger GEMM is never faster. (A split is allowed only while C has
//! fewer than 2U tiles; such a GEMM takes at most the two waves that any larger one takes.)

use narrows_plan::kernel::Gemm;
use narrows_plan::{DType, Seconds};

use crate::profile::{DeviceSpec, GemmCurve};

/// Split-K factors that are tried.
const SPLIT_K_FACTORS: [u64; 3] = [2, 4, 8];
/// Bytes of an element of a split-K part, in fp32.
const PART_BYTES: f64 = 4.0;

/// Prices GEMMs; see the [module](self).
#[derive(Clone, Debug)]
pub(super) struct GemmPrice {
    start_s: f64,
    units: u64,
    memory_s_per_byte: f64,
    tiles: Vec<TilePrice>,
    /// Format of operands in place of that of a GEMM.
    operands: Option<DType>,
}

/// The costs of one wave of one tile shape.
#[derive(Clone, Copy, Debug)]
struct TilePrice {
    rows: u64,
    columns: u64,
    bf16_s_per_k: f64,
    f32_s_per_k: f64,
    epilogue_s_per_byte: f64,
}

impl GemmPrice {
    /// From parts of a validated profile.
    pub(super) fn new(curve: &GemmCurve, device: &DeviceSpec) -> Self {
        let loads = |rows: u32, columns: u32| {
            1.0 + curve.tile_overhead_elements * (1.0 / f64::from(rows) + 1.0 / f64::from(columns))
        };
        let least =
            curve.tiles.iter().map(|t| loads(t.rows, t.columns)).fold(f64::INFINITY, f64::min);
        let units = f64::from(device.compute_units);
        let tiles = curve.tiles.iter().map(|tile| {
            let area = f64::from(tile.rows) * f64::from(tile.columns);
            let wave = 2.0 * area * units * loads(tile.rows, tile.columns) / least;
            let bandwidth = device.memory_bandwidth_bytes_per_s;
            TilePrice {
                rows: u64::from(tile.rows),
                columns: u64::from(tile.columns),
                bf16_s_per_k: wave / (device.peak_flops_per_s.bf16 * curve.efficiency_max),
                f32_s_per_k: wave / (device.peak_flops_per_s.f32 * curve.efficiency_max),
                epilogue_s_per_byte: curve.exposed_epilogue * units * area / bandwidth,
            }
        });
        GemmPrice {
            start_s: curve.start_s,
            units: u64::from(device.compute_units),
            memory_s_per_byte: 1.0
                / (device.memory_bandwidth_bytes_per_s * curve.memory_efficiency),
            tiles: tiles.collect(),
            operands: curve.operands,
        }
    }

    /// Seconds without the launch gap.
    pub(super) fn price(&self, gemm: &Gemm) -> Seconds {
        let compute = self.tiles.iter().map(|tile| self.compute(gemm, tile));
        let compute = compute.fold(f64::INFINITY, f64::min);
        let (m, n, k) = (gemm.m as f64, gemm.n as f64, gemm.k as f64);
        let operands = gemm.input.width() as f64 * k * (m + n);
        let bytes = gemm.batch as f64 * (operands + output_bytes_per_element(gemm) * m * n);
        Seconds(self.start_s + compute.max(bytes * self.memory_s_per_byte))
    }

    fn compute(&self, gemm: &Gemm, tile: &TilePrice) -> f64 {
        let s_per_k = match self.operands.unwrap_or(gemm.input) {
            DType::Bf16 => tile.bf16_s_per_k,
            DType::F32 | DType::U32 => tile.f32_s_per_k,
        };
        let tiles = gemm
            .m
            .div_ceil(tile.rows)
            .saturating_mul(gemm.n.div_ceil(tile.columns))
            .saturating_mul(gemm.batch);
        let waves = |tiles: u64| tiles.div_ceil(self.units) as f64;
        let w = output_bytes_per_element(gemm);
        let whole = waves(tiles) * (s_per_k * gemm.k as f64 + tile.epilogue_s_per_byte * w);
        if tiles >= 2 * self.units {
            return whole;
        }
        let elements = gemm.batch as f64 * gemm.m as f64 * gemm.n as f64;
        let split = |s: u64| {
            let wave = s_per_k * gemm.k.div_ceil(s) as f64 + tile.epilogue_s_per_byte * PART_BYTES;
            let sum = elements * (PART_BYTES * s as f64 + w) * self.memory_s_per_byte;
            waves(tiles * s) * wave + sum
        };
        SPLIT_K_FACTORS.iter().map(|&s| split(s)).fold(whole, f64::min)
    }
}

/// Bytes that cross the memory bus for one element of C.
fn output_bytes_per_element(gemm: &Gemm) -> f64 {
    let accesses = if gemm.accumulate { 2.0 } else { 1.0 };
    gemm.output.width() as f64 * accesses
}
