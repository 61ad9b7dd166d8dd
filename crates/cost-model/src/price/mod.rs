//! From a kernel to seconds.
//!
//! ```text
//! time(kernel) = launch gap of the executor + start of its kind + max(work / rate, bytes / bandwidth)
//! ```
//! with one module for each kind: [`gemm`], [`attention`], [`pass`], [`collective`]. A price
//! depends on the profile, the executor and the shape alone, so that the same kernel costs the same
//! in the planner's table and in the simulator.

pub mod attention;
pub mod collective;
pub mod gemm;
pub mod measured;
pub mod nccl;
pub mod pass;
pub mod topology;

use narrows_plan::{Kernel, Mesh, Seconds};

use crate::profile::{Executor, Profile};
use attention::AttentionPrice;
use collective::LinkPrice;
use gemm::GemmPrice;
use measured::{Correction, NEAR};
use pass::PassPrice;
use topology::Topology;

/// The prices of one executor on one mesh of one kind of hardware.
///
/// ```
/// use narrows_cost_model::{Executor, Prices, profile};
/// use narrows_plan::kernel::{Gemm, Kernel};
/// use narrows_plan::{DType, Mesh};
///
/// let a100 = profile::preset("a100-80gb").unwrap();
/// let prices = Prices::new(&a100, Executor::Captured, &Mesh { tensor: 4, pipeline: 1, data: 1 });
/// let product = |n, k| {
///     let (input, output) = (DType::Bf16, DType::Bf16);
///     Kernel::Gemm(Gemm { m: 16_384, n, k, batch: 1, accumulate: false, input, output })
/// };
/// // The same work in a skinny form, as r/p-wide factors have it, takes longer.
/// assert!(prices.kernel(&product(4096, 256)).0 > 1.1 * prices.kernel(&product(1024, 1024)).0);
/// ```
#[derive(Clone, Debug)]
pub struct Prices {
    launch_gap: Seconds,
    gemm: GemmPrice,
    attention: AttentionPrice,
    pass: PassPrice,
    links: LinkPrice,
    half_widths: HalfWidths,
    /// What a device has of a machine that was measured as a whole; 1 where devices are whole.
    sharing: f64,
    peak_flops_per_s: f64,
    correction: Option<Correction>,
}

/// Relative 90 % half-widths by kind of kernel.
#[derive(Clone, Copy, Debug)]
struct HalfWidths {
    gemm: f64,
    attention: f64,
    pass: f64,
    intra_node: f64,
    inter_node: f64,
}

impl Prices {
    /// Prices for `mesh`, whose devices fill nodes in the order of their numbers.
    pub fn new(profile: &Profile, executor: Executor, mesh: &Mesh) -> Self {
        let file = profile.file();
        let topology = Topology::new(profile.devices_per_node(), mesh.devices());
        let mut prices = Prices {
            launch_gap: Seconds(profile.launching(executor).launch_gap_s),
            gemm: GemmPrice::new(&file.gemm, &file.device),
            attention: AttentionPrice::new(&file.attention, &file.device, &file.passes),
            pass: PassPrice::new(&file.passes, &file.device, profile.fuses_passes(executor)),
            links: LinkPrice::new(&file.links, topology),
            half_widths: HalfWidths {
                gemm: file.gemm.relative_error.half_width_90,
                attention: file.attention.relative_error.half_width_90,
                pass: file.passes.relative_error.half_width_90,
                intra_node: file.links.relative_error.half_width_90,
                inter_node: file.links.inter_node.relative_error.half_width_90,
            },
            sharing: 1.0,
            peak_flops_per_s: profile.peak_flops_per_s(profile.precision().compute()),
            correction: None,
        };
        if let Some(measured) = &file.measured {
            let curves = |kernel: &Kernel, devices: u64| {
                prices.curves(kernel, devices as f64).unwrap_or_default().0
            };
            let correction = Correction::new(measured, mesh.devices(), curves);
            prices.sharing = mesh.devices() as f64;
            prices.correction = Some(correction);
        }
        prices
    }

    /// The time a kernel takes on its device, launch gap included. Finite and never negative.
    ///
    /// A collective or transfer among fewer than two devices, or of nothing, is never launched and
    /// costs nothing.
    pub fn kernel(&self, kernel: &Kernel) -> Seconds {
        let Some(curves) = self.curves(kernel, self.sharing) else { return Seconds(0.0) };
        let Some(correction) = &self.correction else { return curves };
        let least = match kernel {
            Kernel::Gemm(gemm) => gemm.flops().0 / self.peak_flops_per_s,
            Kernel::Attention(attention) => attention.flops().0 / self.peak_flops_per_s,
            _ => 0.0,
        };
        Seconds((curves.0 * correction.factor(kernel)).max(least))
    }

    /// The price by the profile's curves alone, for one of so many devices that share a machine.
    /// `None` for what is never launched.
    fn curves(&self, kernel: &Kernel, sharing: f64) -> Option<Seconds> {
        let alone = match kernel {
            Kernel::Gemm(gemm) => self.launch_gap + self.gemm.price(gemm),
            Kernel::Attention(attention) => self.launch_gap + self.attention.price(attention),
            Kernel::Pass(pass) => self.pass.price(pass, self.launch_gap),
            Kernel::Collective(c) if c.group.size > 1 && c.payload.0 > 0 => {
                return Some(self.launch_gap + self.links.collective(c));
            }
            Kernel::Transfer(t) if t.group.size > 1 && t.bytes.0 > 0 => {
                return Some(self.launch_gap + self.links.transfer(t));
            }
            Kernel::Collective(_) | Kernel::Transfer(_) => return None,
        };
        Some(alone * sharing)
    }

    /// The measurements that correct these prices, if the machine was measured.
    pub fn correction(&self) -> Option<&Correction> {
        self.correction.as_ref()
    }

    /// Whether a machine was measured, and nothing like this kernel on it.
    pub fn unmeasured(&self, kernel: &Kernel) -> bool {
        self.correction.as_ref().is_some_and(|known| known.distance(kernel) > NEAR)
            && self.curves(kernel, 1.0).is_some()
    }

    /// The time between the end of a kernel and the start of the next one.
    pub fn launch_gap(&self) -> Seconds {
        self.launch_gap
    }

    /// Nine measurements of `kernel` in ten lie within its price · (1 ± this), as far as the
    /// profile knows; [`Profile::assumed`] says which half-widths nobody measured.
    pub fn relative_half_width(&self, kernel: &Kernel) -> f64 {
        let link = |group| {
            if self.links.crosses_nodes(group) {
                self.half_widths.inter_node
            } else {
                self.half_widths.intra_node
            }
        };
        let half_width = match kernel {
            Kernel::Gemm(_) => self.half_widths.gemm,
            Kernel::Attention(_) => self.half_widths.attention,
            Kernel::Pass(_) => self.half_widths.pass,
            Kernel::Collective(collective) => link(&collective.group),
            Kernel::Transfer(transfer) => link(&transfer.group),
        };
        // Each doubling beyond what was measured adds as much again.
        let beyond = self.correction.as_ref().map_or(0.0, |known| known.distance(kernel) - NEAR);
        if beyond > 0.0 { (half_width * (1.0 + beyond)).min(1.0) } else { half_width }
    }
}
