//! Prices of kernels in seconds.
//!
//! ```text
//! time(kernel) = launch gap of the executor + start of its kind + max(work / rate, bytes / bandwidth)
//! ```
//! with one module for each kind of kernel. The time of the host for the launches of a kernel is apart
//! ([`Prices::host_time`]): the device waits for it only where it has nothing else to do
//! ([`LaunchQueue`](crate::LaunchQueue)). A price depends on the profile, the executor, the mesh and the kernel's
//! shape alone, so that the same kernel costs the same in the planner's table and in the simulator.

mod attention;
mod collective;
mod correction;
mod fused;
mod gemm;
mod nccl;
mod ring;
mod scaled_measurements;
mod topology;

use narrows_plan::kernel::{FusedKind, Gemm};
use narrows_plan::program::{Action, Extent, FusedOp};
use narrows_plan::{DType, DeviceGroup, Kernel, Mesh, Seconds};

use crate::kernel_shape::{
    KernelClass, MeasuredShapes, NEAR_OCTAVES, OTHER_KIND_OCTAVES, error_scale, growing_error_scale,
};
use crate::overlap::OverlapSlowdown;
use crate::profile::{
    Executor, GemmCurve, OverlapSpec, Profile, ProfileFile, RelativeError, fitted_shapes,
};
use attention::AttentionPrice;
pub use collective::GroupLinks;
use collective::LinkPrice;
use correction::MeasuredCorrection;
use fused::FusedPrice;
use gemm::GemmPrice;
pub(crate) use ring::ring_computation;
use ring::{longer_shift, resampled_ring_times_s, ring_launches, ring_steps, ring_time};
pub use scaled_measurements::scale_measurements;
use topology::Topology;

/// The time of a kernel on one device.
pub type KernelPrice<'a> = &'a (dyn Fn(&Kernel) -> Seconds + Sync);

/// Prices of the kernels of a device's streams.
#[derive(Clone, Copy)]
pub struct StreamPrices<'a> {
    /// Times of kernels that run alone, but for those of backward passes.
    pub kernel: KernelPrice<'a>,
    /// Times of kernels of backward passes that run alone, but for those below.
    pub backward: KernelPrice<'a>,
    /// Times of kernels in backward passes that recompute values or zero sums, alone: their place in a pass depends on other choices.
    pub recompute: KernelPrice<'a>,
    /// Slowdown of computation and collectives that run at the same time; `None` where they run one after the other.
    pub overlap: Option<OverlapSlowdown>,
    /// Prices of launches on the host; `None` where the device never waits for its host.
    pub host: Option<&'a Prices>,
}

impl<'a> StreamPrices<'a> {
    /// The same times for the kernels of all passes, and no launches on the host.
    pub fn new(kernel: KernelPrice<'a>, overlap: Option<OverlapSlowdown>) -> StreamPrices<'a> {
        StreamPrices { kernel, backward: kernel, recompute: kernel, overlap, host: None }
    }

    /// The same prices with others for the kernels of backward passes, and for those of these that recompute values or zero sums.
    #[must_use]
    pub fn with_backward(
        self,
        backward: KernelPrice<'a>,
        recompute: KernelPrice<'a>,
    ) -> StreamPrices<'a> {
        StreamPrices { backward, recompute, ..self }
    }
}

/// The prices of one executor on one mesh of one kind of hardware.
///
/// ```
/// use narrows_cost_model::{Executor, Prices, profile};
/// use narrows_plan::kernel::{Gemm, Kernel};
/// use narrows_plan::{DType, Mesh};
///
/// let a100 = profile::preset("a100-80gb").unwrap();
/// let prices = Prices::new(&a100, Executor::Captured, &Mesh { tensor: 4, pipeline: 1, data: 1, context: 1 });
/// let gemm = |n, k| {
///     let (input, output) = (DType::Bf16, DType::Bf16);
///     Kernel::Gemm(Gemm { m: 16_384, n, k, batch: 1, accumulate: false, residual: false, input, output })
/// };
/// // A skinny GEMM, such as a factor of width r/p, takes longer for the same work.
/// assert!(prices.kernel_time(&gemm(4096, 256)).0 > 1.1 * prices.kernel_time(&gemm(1024, 1024)).0);
/// ```
#[derive(Clone, Debug)]
pub struct Prices {
    launch_gap: Seconds,
    host_launch: Seconds,
    gemm: GemmPrice,
    attention: AttentionPrice,
    fused: FusedPrice,
    links: LinkPrice,
    /// 90 % half-widths of relative errors, in the order of [`PriceSource::ALL`].
    half_widths: [f64; 5],
    /// Devices that share the machine of the curves; 1 for whole devices.
    devices_sharing: f64,
    /// Whether the correction uses measurements of whole devices: kernels within a node, without launch gaps.
    whole_devices: bool,
    peak_flops_per_s: f64,
    gemm_peak_flops_per_s: f64,
    overlap_slowdown: Option<OverlapSlowdown>,
    correction: Option<MeasuredCorrection>,
    gemm_error_growth: Option<f64>,
    /// The shapes that the curves were fitted to, in a profile without measurements of its own.
    fitted_shapes: Option<MeasuredShapes>,
    /// The shapes that the curves of the profile named in `form_of` were fitted to.
    form_shapes: Option<&'static MeasuredShapes>,
}

/// The group of a profile's numbers that a kernel's price and error come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PriceSource {
    /// GEMMs.
    Gemm,
    /// Attention.
    Attention,
    /// Fused ops.
    Fused,
    /// Links inside a node.
    IntraNode,
    /// Links between nodes.
    InterNode,
}

impl PriceSource {
    /// All sources, in declaration order.
    pub const ALL: [PriceSource; 5] = [
        PriceSource::Gemm,
        PriceSource::Attention,
        PriceSource::Fused,
        PriceSource::IntraNode,
        PriceSource::InterNode,
    ];
}

impl Prices {
    /// Prices for `mesh`, whose devices fill nodes in rank order.
    pub fn new(profile: &Profile, executor: Executor, mesh: &Mesh) -> Self {
        Prices::from_file(profile.file(), executor, mesh)
    }

    /// Prices from a file whose numbers are within the ranges of [`ProfileFile::resolve`], such as a refit.
    pub fn from_file(file: &ProfileFile, executor: Executor, mesh: &Mesh) -> Self {
        let mut prices = Prices::without_correction(file, executor, mesh);
        if let Some(measured) = &file.measured {
            let devices_share_machine = measured.devices_share_machine();
            // Measured GEMMs have operands in their own format.
            let mut as_measured = prices.clone();
            let gemm = GemmCurve { operands: None, ..file.gemm.clone() };
            as_measured.gemm = GemmPrice::new(&gemm, &file.device);
            let curve_time_s = |kernel: &Kernel, devices| {
                as_measured.measured_curve_s(file, devices_share_machine, kernel, devices)
            };
            let correction = MeasuredCorrection::new(measured, mesh.devices(), curve_time_s);
            prices.whole_devices = !devices_share_machine;
            prices.devices_sharing =
                if devices_share_machine { mesh.devices() as f64 } else { 1.0 };
            prices.correction = Some(correction);
        }
        prices
    }

    /// The price in seconds that a measurement of a kernel is compared with: by the curves of the profile's file, without
    /// corrections. On whole devices it is that on the mesh that the measurement was taken on, in nodes of the profile's
    /// size, without the launch gap; 0 for kernels that are never launched or that cross nodes.
    fn measured_curve_s(
        &self,
        file: &ProfileFile,
        devices_share_machine: bool,
        kernel: &Kernel,
        devices: u64,
    ) -> f64 {
        if devices_share_machine {
            return self.curve_time(kernel, devices as f64).unwrap_or_default().0;
        }
        let ProfileFile { links, fused, device, .. } = file;
        let topology = Topology::new(u64::from(links.devices_per_node), devices);
        let attention = AttentionPrice::measured(file);
        let fused = FusedPrice::new(fused, device, true);
        self.execution_time_s(kernel, &attention, fused, &LinkPrice::new(links, topology))
    }

    /// Prices by the curves alone.
    fn without_correction(file: &ProfileFile, executor: Executor, mesh: &Mesh) -> Self {
        let devices_per_node = u64::from(file.links.devices_per_node);
        let topology = Topology::new(devices_per_node, mesh.devices());
        let launch_costs = file.executors.of(executor);
        let fuses_ops = file.executors.fuses_ops(executor);
        let errors = [
            &file.gemm.relative_error,
            &file.attention.relative_error,
            &file.fused.relative_error,
            &file.links.relative_error,
            &file.links.inter_node.relative_error,
        ];
        let peak = |dtype| match dtype {
            DType::Bf16 => file.device.peak_flops_per_s.bf16,
            DType::F32 | DType::U32 => file.device.peak_flops_per_s.f32,
        };
        let compute_dtype = file.precision.compute_dtype();
        Prices {
            launch_gap: Seconds(launch_costs.launch_gap_s),
            host_launch: Seconds(launch_costs.host_launch_s),
            gemm: GemmPrice::new(&file.gemm, &file.device),
            attention: AttentionPrice::new(file, executor, mesh),
            fused: FusedPrice::new(&file.fused, &file.device, fuses_ops),
            links: LinkPrice::new(&file.links, topology),
            half_widths: errors.map(|error: &RelativeError| error.half_width_90),
            devices_sharing: 1.0,
            whole_devices: false,
            peak_flops_per_s: peak(compute_dtype),
            gemm_peak_flops_per_s: peak(file.gemm.operands.unwrap_or(compute_dtype)),
            overlap_slowdown: file.overlap.as_ref().map(OverlapSpec::slowdown),
            correction: None,
            gemm_error_growth: file.gemm.error_growth.as_ref().map(|growth| growth.per_octave),
            fitted_shapes: file
                .refits
                .as_ref()
                .map(|refits| MeasuredShapes::from_kernels(&refits.kernels)),
            form_shapes: file.form_of.as_deref().and_then(fitted_shapes),
        }
    }

    /// The time that a kernel takes on its device, launch gap included. Finite and never negative.
    ///
    /// A collective or transfer among fewer than two devices, or of nothing, is never launched and
    /// costs nothing.
    pub fn kernel_time(&self, kernel: &Kernel) -> Seconds {
        if let Some(steps) = ring_steps(kernel) {
            return ring_time(&steps, self.overlap_slowdown, |kernel| self.kernel_time(kernel));
        }
        let Some(curves) = self.curve_time(kernel, self.devices_sharing) else {
            return Seconds(0.0);
        };
        let factor = match &self.correction {
            Some(correction) if self.is_corrected(kernel) => correction.factor(kernel),
            _ => return curves,
        };
        Seconds(self.corrected_time_s(kernel, curves.0, factor))
    }

    /// The time of a kernel in seconds for each of several draws of the measurements. `None` for a profile without
    /// measurements, and for a kernel that is never launched.
    pub(crate) fn resampled_kernel_times_s(
        &self,
        kernel: &Kernel,
        draws: usize,
    ) -> Option<Vec<f64>> {
        if let Some(steps) = ring_steps(kernel) {
            let resampled = |kernel: &Kernel| self.resampled_kernel_times_s(kernel, draws);
            return resampled_ring_times_s(&steps, self.overlap_slowdown, (draws, resampled));
        }
        let correction = self.correction.as_ref()?;
        let curves = self.curve_time(kernel, self.devices_sharing)?.0;
        if !self.is_corrected(kernel) {
            return Some(vec![curves; draws]);
        }
        let factors = correction.resampled_factors(kernel, draws);
        let times = factors.into_iter().map(|factor| self.corrected_time_s(kernel, curves, factor));
        Some(times.collect())
    }

    /// Number of launches of a kernel, if it is launched.
    fn launches(&self, kernel: &Kernel) -> u32 {
        match kernel {
            Kernel::Fused(op) => self.fused.launches(op),
            Kernel::Gemm(gemm) if self.adds_residual_apart(gemm) => {
                1 + self.launches(&residual_addition(gemm))
            }
            _ => ring_steps(kernel)
                .map_or(1, |steps| ring_launches(&steps, |kernel| self.launches(kernel))),
        }
    }

    /// Whether a residual sum is a GEMM and an addition: an executor without fusion launches operators.
    fn adds_residual_apart(&self, gemm: &Gemm) -> bool {
        gemm.residual && !self.fused.is_fused()
    }

    /// The time of the host for the launches of a kernel; zero for a kernel that is never launched, and for updates, of
    /// which frameworks launch many parameters' at once.
    pub fn host_time(&self, kernel: &Kernel) -> Seconds {
        let is_update = matches!(kernel, Kernel::Fused(op) if op.kind == FusedKind::Optimizer);
        if is_update || self.curve_time(kernel, 1.0).is_none() {
            return Seconds(0.0);
        }
        self.host_launch * f64::from(self.launches(kernel))
    }

    /// Whether measurements correct the price of a kernel. On whole devices, links between nodes are not measured.
    fn is_corrected(&self, kernel: &Kernel) -> bool {
        !self.whole_devices || self.source(kernel) != PriceSource::InterNode
    }

    /// The corrected price. On whole devices, the launch gaps of the executor are not corrected.
    fn corrected_time_s(&self, kernel: &Kernel, curves_s: f64, factor: f64) -> f64 {
        let launches = f64::from(self.launches(kernel));
        let gaps = if self.whole_devices { self.launch_gap.0 * launches } else { 0.0 };
        gaps + ((curves_s - gaps) * factor).max(self.peak_rate_time_s(kernel))
    }

    /// The price by the curves without the launch gap; 0 for kernels that are never launched or that cross nodes.
    fn execution_time_s(
        &self,
        kernel: &Kernel,
        attention: &AttentionPrice,
        fused: FusedPrice,
        links: &LinkPrice,
    ) -> f64 {
        let price = match kernel {
            Kernel::Gemm(gemm) => self.gemm.price(gemm),
            Kernel::Attention(op) => attention.price(op),
            Kernel::Fused(op) => fused.price(op, Seconds(0.0)),
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

    /// The time at the peak rate: the lower limit of corrected prices.
    fn peak_rate_time_s(&self, kernel: &Kernel) -> f64 {
        match kernel {
            Kernel::Gemm(gemm) => gemm.flops().0 / self.gemm_peak_flops_per_s,
            Kernel::Attention(attention) => attention.flops().0 / self.peak_flops_per_s,
            _ => 0.0,
        }
    }

    /// The price by the profile's curves alone, on one of `devices_sharing` devices that share a machine.
    /// `None` for a kernel that is never launched.
    fn curve_time(&self, kernel: &Kernel, devices_sharing: f64) -> Option<Seconds> {
        let whole_machine = match kernel {
            Kernel::Gemm(gemm) if self.adds_residual_apart(gemm) => {
                let product = Gemm { accumulate: false, residual: false, ..gemm.clone() };
                let addition = self.curve_time(&residual_addition(gemm), 1.0);
                self.launch_gap + self.gemm.price(&product) + addition.unwrap_or_default()
            }
            Kernel::Gemm(gemm) => self.launch_gap + self.gemm.price(gemm),
            Kernel::Attention(attention) => self.launch_gap + self.attention.price(attention),
            Kernel::Fused(op) => self.fused.price(op, self.launch_gap),
            Kernel::Collective(c) if c.group.size > 1 && c.payload.0 > 0 => {
                return Some(self.launch_gap + self.links.collective(c));
            }
            Kernel::Transfer(t) if t.group.size > 1 && t.bytes.0 > 0 => {
                return Some(self.launch_gap + self.links.transfer(t));
            }
            Kernel::Collective(_) | Kernel::Transfer(_) => return None,
        };
        Some(whole_machine * devices_sharing)
    }

    /// For each measurement of a class, ln(measured / price by the other measurements) over the [`error_scale`] of
    /// its distance from them; `None` for a profile without measurements.
    pub fn leave_one_out_residuals(&self, class: KernelClass) -> Option<Vec<f64>> {
        Some(self.correction.as_ref()?.leave_one_out_residuals(class))
    }

    /// Whether the profile has measured shapes, and none of them is near this kernel.
    pub fn is_unmeasured(&self, kernel: &Kernel) -> bool {
        self.has_measured_shapes()
            && self.distance_octaves(kernel) > NEAR_OCTAVES
            && self.curve_time(kernel, 1.0).is_some()
    }

    /// Whether the profile has any measured shape.
    pub(crate) fn has_measured_shapes(&self) -> bool {
        self.correction.is_some() || self.fitted_shapes.is_some()
    }

    /// Distance to the nearest measured shape, in octaves; infinite when no kernel of the class was measured.
    /// Published figures are from one node, so for them links between nodes count as unmeasured. An own kernel that was not
    /// measured counts as one of another kind.
    pub(crate) fn distance_octaves(&self, kernel: &Kernel) -> f64 {
        let other_kind = match kernel {
            Kernel::Attention(op) if self.attention.is_own(op) => OTHER_KIND_OCTAVES,
            _ => 0.0,
        };
        match (&self.correction, &self.fitted_shapes) {
            (Some(_), _) if !self.is_corrected(kernel) => f64::INFINITY,
            (Some(correction), _) => correction.distance_octaves(kernel) + other_kind,
            (None, Some(_)) if self.source(kernel) == PriceSource::InterNode => f64::INFINITY,
            (None, Some(shapes)) => shapes.distance_octaves(kernel, 1),
            (None, None) => f64::INFINITY,
        }
    }

    /// The group of numbers that the kernel's price comes from.
    pub fn source(&self, kernel: &Kernel) -> PriceSource {
        let group = match kernel {
            Kernel::Gemm(_) => return PriceSource::Gemm,
            Kernel::Attention(_) => {
                let shift = ring_steps(kernel)
                    .and_then(|steps| longer_shift(&steps, |kernel| self.kernel_time(kernel)));
                return shift.map_or(PriceSource::Attention, |shift| self.source(&shift));
            }
            Kernel::Fused(_) => return PriceSource::Fused,
            Kernel::Collective(collective) => &collective.group,
            Kernel::Transfer(transfer) => &transfer.group,
        };
        if self.links.crosses_nodes(group) {
            PriceSource::InterNode
        } else {
            PriceSource::IntraNode
        }
    }

    /// Prices with a bandwidth between nodes no lower than that inside a node: the same for all bandwidths below it, and for
    /// no kernel higher than these. `None` where the bandwidth is that high already, on one node, and where prices between nodes
    /// follow from measurements.
    pub fn with_fast_inter_node_links(&self) -> Option<Prices> {
        if self.correction.is_some() && !self.whole_devices {
            return None;
        }
        Some(Prices { links: self.links.with_fast_inter_node_links()?, ..self.clone() })
    }

    /// All of the links that the prices in one device group depend on.
    pub fn group_links(&self, group: &DeviceGroup) -> GroupLinks {
        self.links.of_group(group)
    }

    /// The slowdown of computation and of a collective that overlap; `None` where the hardware does not overlap them.
    pub fn overlap_slowdown(&self) -> Option<OverlapSlowdown> {
        self.overlap_slowdown
    }

    /// The prices of kernels with the slowdown of overlapped kernels. `kernel` is
    /// [`kernel_time`](Prices::kernel_time), or prices derived from it.
    pub fn streams<'a>(&'a self, kernel: KernelPrice<'a>) -> StreamPrices<'a> {
        let host = (self.host_launch.0 > 0.0).then_some(self);
        StreamPrices { host, ..StreamPrices::new(kernel, self.overlap_slowdown) }
    }

    /// The time between the end of a kernel and the start of the next one.
    pub fn launch_gap(&self) -> Seconds {
        self.launch_gap
    }

    /// Factor on the error of the kernel's class, by the distance to the nearest measurement. Where no kernel of the
    /// class was measured here, the distance is to the shapes of the preset named in `form_of`; without such a
    /// preset, all shapes of the class have the same error.
    pub(crate) fn error_scale(&self, kernel: &Kernel) -> f64 {
        let distance = self.distance_octaves(kernel);
        let within_node = self.source(kernel) != PriceSource::InterNode;
        match self.form_shapes {
            Some(form) if distance.is_infinite() && within_node => {
                error_scale(form.distance_octaves(kernel, 1))
            }
            _ => error_scale(distance),
        }
    }

    /// As [`error_scale`](Prices::error_scale), for a kernel that is priced alone: errors of the GEMMs of a step, which
    /// have many shapes, partly cancel.
    pub(crate) fn lone_error_scale(&self, kernel: &Kernel) -> f64 {
        match (kernel, &self.fitted_shapes, self.gemm_error_growth) {
            (Kernel::Gemm(gemm), Some(shapes), Some(growth)) => {
                growing_error_scale(shapes.gemm_distance_octaves(gemm), growth)
            }
            _ => self.error_scale(kernel),
        }
    }

    /// The h for which nine measurements of `kernel` alone in ten lie between price / (1 + h) and price · (1 + h), by the
    /// errors in the profile; [`Profile::assumed_paths`] lists the errors that were not measured.
    pub fn relative_half_width(&self, kernel: &Kernel) -> f64 {
        let half_width = self.half_widths[self.source(kernel) as usize];
        (half_width.ln_1p() * self.lone_error_scale(kernel)).exp_m1()
    }
}

/// The addition of a residual to the product of a GEMM.
fn residual_addition(gemm: &Gemm) -> Kernel {
    let columns = gemm.n.saturating_mul(gemm.batch);
    let extent = Extent { rows: gemm.m, columns, dtype: gemm.output };
    Action::Fused(FusedOp::Add).kernel(&[extent, extent], &[extent])
}
