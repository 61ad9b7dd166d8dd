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
pub mod shapes;
pub mod topology;

use narrows_plan::{DType, Kernel, Mesh, Seconds};

use crate::profile::{Executor, Profile, ProfileFile, RelativeError, measured_shapes};
use attention::AttentionPrice;
use collective::LinkPrice;
use gemm::GemmPrice;
use measured::MeasuredCorrection;
use pass::FusedPrice;
use shapes::{MeasuredShapes, NEAR, scale};
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
    pass: FusedPrice,
    links: LinkPrice,
    half_widths: [f64; 5],
    /// What a device has of a machine that was measured as a whole; 1 where devices are whole.
    sharing: f64,
    /// Whether the corrections are those of whole devices: of kernels inside a node alone, without launch gaps.
    whole: bool,
    peak_flops_per_s: f64,
    correction: Option<MeasuredCorrection>,
    /// What was measured of a profile that is not corrected.
    shapes: Option<MeasuredShapes>,
    /// What was measured of the hardware whose curves these have the form of.
    form: Option<&'static MeasuredShapes>,
}

/// What a kernel's price, and its error, comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PriceSource {
    /// Products.
    Gemm,
    /// Attention.
    Attention,
    /// Passes.
    Pass,
    /// Links inside a node.
    IntraNode,
    /// Links between nodes.
    InterNode,
}

impl PriceSource {
    /// All of them, in their order.
    pub const ALL: [PriceSource; 5] = [
        PriceSource::Gemm,
        PriceSource::Attention,
        PriceSource::Pass,
        PriceSource::IntraNode,
        PriceSource::InterNode,
    ];
}

impl Prices {
    /// Prices for `mesh`, whose devices fill nodes in the order of their numbers.
    pub fn new(profile: &Profile, executor: Executor, mesh: &Mesh) -> Self {
        Prices::of(profile.file(), executor, mesh)
    }

    /// The same for numbers that were checked.
    pub fn of(file: &ProfileFile, executor: Executor, mesh: &Mesh) -> Self {
        let per_node = u64::from(file.links.devices_per_node);
        let topology = Topology::new(per_node, mesh.devices());
        let launching = match executor {
            Executor::Captured => &file.executors.captured,
            Executor::Eager => &file.executors.eager,
        };
        let errors = [
            &file.gemm.relative_error,
            &file.attention.relative_error,
            &file.passes.relative_error,
            &file.links.relative_error,
            &file.links.inter_node.relative_error,
        ];
        let peak = &file.device.peak_flops_per_s;
        let mut prices = Prices {
            launch_gap: Seconds(launching.launch_gap_s),
            gemm: GemmPrice::new(&file.gemm, &file.device),
            attention: AttentionPrice::new(&file.attention, &file.device, &file.passes),
            pass: FusedPrice::new(&file.passes, &file.device, launching.fuses_passes),
            links: LinkPrice::new(&file.links, topology),
            half_widths: errors.map(|error: &RelativeError| error.half_width_90),
            sharing: 1.0,
            whole: false,
            peak_flops_per_s: match file.precision.compute() {
                DType::Bf16 => peak.bf16,
                DType::F32 | DType::U32 => peak.f32,
            },
            correction: None,
            shapes: file.refits.as_ref().map(|refits| MeasuredShapes::of(&refits.kernels)),
            form: file.form_of.as_deref().and_then(measured_shapes),
        };
        if let Some(measured) = &file.measured {
            let correction = if measured.is_shared() {
                let curves = |kernel: &Kernel, devices: u64| {
                    prices.curves(kernel, devices as f64).unwrap_or_default().0
                };
                MeasuredCorrection::new(measured, mesh.devices(), curves)
            } else {
                // As many devices as there were, in nodes of this size: whatever this mesh is.
                let links = |devices| LinkPrice::new(&file.links, Topology::new(per_node, devices));
                let fused = FusedPrice::new(&file.passes, &file.device, true);
                let alone = |kernel: &Kernel, devices| prices.alone(kernel, fused, &links(devices));
                MeasuredCorrection::new(measured, mesh.devices(), alone)
            };
            prices.whole = !measured.is_shared();
            prices.sharing = if prices.whole { 1.0 } else { mesh.devices() as f64 };
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
        let factor = match &self.correction {
            Some(correction) if self.is_corrected(kernel) => correction.factor(kernel),
            _ => return curves,
        };
        Seconds(self.corrected(kernel, curves.0, factor))
    }

    /// The times that so many draws of the measurements would give, in seconds; `None` where there are
    /// none that correct prices.
    pub fn drawn(&self, kernel: &Kernel, draws: usize) -> Option<Vec<f64>> {
        let correction = self.correction.as_ref()?;
        let curves = self.curves(kernel, self.sharing)?.0;
        if !self.is_corrected(kernel) {
            return Some(vec![curves; draws]);
        }
        let factors = correction.drawn_factors(kernel, draws);
        let drawn = factors.into_iter().map(|factor| self.corrected(kernel, curves, factor));
        Some(drawn.collect())
    }

    /// Of whole devices, what crosses nodes was not measured.
    fn is_corrected(&self, kernel: &Kernel) -> bool {
        !self.whole || self.source(kernel) != PriceSource::InterNode
    }

    /// A price by the curves, corrected. The launch gaps of whole devices are the executor's, and no measurement of
    /// a kernel changes them.
    fn corrected(&self, kernel: &Kernel, curves_s: f64, factor: f64) -> f64 {
        let launches = match kernel {
            Kernel::Fused(pass) => self.pass.launches(pass),
            _ => 1,
        };
        let gaps = if self.whole { self.launch_gap.0 * f64::from(launches) } else { 0.0 };
        gaps + ((curves_s - gaps) * factor).max(self.least_s(kernel))
    }

    /// The price of a fused kernel by the curves, without the gap before it; 0 of what is never launched, and of
    /// what crosses nodes.
    fn alone(&self, kernel: &Kernel, fused: FusedPrice, links: &LinkPrice) -> f64 {
        let price = match kernel {
            Kernel::Gemm(gemm) => self.gemm.price(gemm),
            Kernel::Attention(attention) => self.attention.price(attention),
            Kernel::Fused(pass) => fused.price(pass, Seconds(0.0)),
            Kernel::Collective(c)
                if c.group.size > 1 && c.payload.0 > 0 && !links.crosses_nodes(&c.group) =>
            {
                links.collective(c)
            }
            Kernel::Transfer(t)
                if t.group.size > 1 && t.bytes.0 > 0 && !links.crosses_nodes(&t.group) =>
            {
                links.transfer(t)
            }
            Kernel::Collective(_) | Kernel::Transfer(_) => Seconds(0.0),
        };
        price.0
    }

    /// What no measurement nearby makes shorter: the time at the peak rate.
    fn least_s(&self, kernel: &Kernel) -> f64 {
        match kernel {
            Kernel::Gemm(gemm) => gemm.flops().0 / self.peak_flops_per_s,
            Kernel::Attention(attention) => attention.flops().0 / self.peak_flops_per_s,
            _ => 0.0,
        }
    }

    /// The price by the profile's curves alone, for one of so many devices that share a machine.
    /// `None` for what is never launched.
    fn curves(&self, kernel: &Kernel, sharing: f64) -> Option<Seconds> {
        let alone = match kernel {
            Kernel::Gemm(gemm) => self.launch_gap + self.gemm.price(gemm),
            Kernel::Attention(attention) => self.launch_gap + self.attention.price(attention),
            Kernel::Fused(pass) => self.pass.price(pass, self.launch_gap),
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
    pub fn correction(&self) -> Option<&MeasuredCorrection> {
        self.correction.as_ref()
    }

    /// Whether shapes were measured, and none like this kernel among them.
    pub fn unmeasured(&self, kernel: &Kernel) -> bool {
        self.knows_shapes() && self.distance(kernel) > NEAR && self.curves(kernel, 1.0).is_some()
    }

    /// Whether the profile knows of any shape that was measured.
    pub fn knows_shapes(&self) -> bool {
        self.correction.is_some() || self.shapes.is_some()
    }

    /// How many octaves the nearest measured shape lies away; infinitely many, when nothing of its class
    /// was measured. Published figures are of one node.
    pub fn distance(&self, kernel: &Kernel) -> f64 {
        match (&self.correction, &self.shapes) {
            (Some(_), _) if !self.is_corrected(kernel) => f64::INFINITY,
            (Some(correction), _) => correction.distance(kernel),
            (None, Some(_)) if self.source(kernel) == PriceSource::InterNode => f64::INFINITY,
            (None, Some(shapes)) => shapes.distance(kernel, 1),
            (None, None) => f64::INFINITY,
        }
    }

    /// What the kernel's price comes from.
    pub fn source(&self, kernel: &Kernel) -> PriceSource {
        let group = match kernel {
            Kernel::Gemm(_) => return PriceSource::Gemm,
            Kernel::Attention(_) => return PriceSource::Attention,
            Kernel::Fused(_) => return PriceSource::Pass,
            Kernel::Collective(collective) => &collective.group,
            Kernel::Transfer(transfer) => &transfer.group,
        };
        if self.links.crosses_nodes(group) {
            PriceSource::InterNode
        } else {
            PriceSource::IntraNode
        }
    }

    /// The time between the end of a kernel and the start of the next one.
    pub fn launch_gap(&self) -> Seconds {
        self.launch_gap
    }

    /// How many times as large the error of a kernel's price is as that of its class. Where nothing of the class
    /// was measured here, it counts how far the kernel lies from what was measured of the hardware whose curves
    /// these have the form of; where that is unknown too, the error of the class is the same for all its shapes.
    pub fn scale(&self, kernel: &Kernel) -> f64 {
        let own = self.distance(kernel);
        let inside = self.source(kernel) != PriceSource::InterNode;
        match self.form {
            Some(form) if own.is_infinite() && inside => scale(form.distance(kernel, 1)),
            _ => scale(own),
        }
    }

    /// Nine measurements of `kernel` in ten lie between its price / (1 + this) and its price · (1 + this), as
    /// far as the profile knows; [`Profile::assumed`] says which half-widths nobody measured.
    pub fn relative_half_width(&self, kernel: &Kernel) -> f64 {
        let half_width = self.half_widths[self.source(kernel) as usize];
        (half_width.ln_1p() * self.scale(kernel)).exp_m1()
    }
}
