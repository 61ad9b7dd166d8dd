//! The roofline of a device with the GEMMs of a block on it.
//!
//! A GEMM of F FLOPs that reads and writes B bytes once has the arithmetic intensity F/B. No GEMM is faster than
//! min(peak, bandwidth · F/B).

use narrows_cost_model::{Prices, Profile};
use narrows_plan::emit::op_forward;
use narrows_plan::kernel::Gemm;
use narrows_plan::strategy::{OpChoice, Strategy};
use narrows_plan::{Context, EdgeLayout, Kernel, Layout, Mesh, SegmentPlan};
use plotters::style::RGBColor;

use super::names::name_points;
use super::picture::{Anchor, Picture, Place};
use super::scale::{Scale, label, labels, rounded};
use super::{GRID, INK, PALETTE};
use crate::text::percent;

const SIZE: (i32, i32) = (900, 560);
const LEFT: i32 = 84;
const RIGHT: i32 = 600;
const TOP: i32 = 96;
const BOTTOM: i32 = 486;
/// Left end of the names.
const NAMES: i32 = 640;
/// Width of the name of the memory bandwidth.
const NAME_WIDTH: i32 = 140;
/// Half the width of a whisker's ends.
const CAP: i32 = 4;
const OPACITY: f64 = 0.5;
/// Room beyond the outermost values, as factors.
const ROOM: [f64; 2] = [2.5, 1.6];

/// A GEMM on one device.
struct RooflinePoint {
    /// FLOPs for each byte.
    intensity: f64,
    /// FLOP/s at the predicted time, and the ends of its 90 % interval.
    rate: f64,
    interval: [f64; 2],
}

/// A GEMM of the forward pass: its shard, and the whole GEMM on one device.
struct OpGemm {
    name: String,
    shard: RooflinePoint,
    whole: Option<RooflinePoint>,
}

/// The GEMMs of the forward pass of a block below the roof of `profile`; `None` for a block without GEMMs.
pub fn roofline_picture(
    title: &str,
    plan: &SegmentPlan,
    context: &Context,
    profile: &Profile,
    prices: &Prices,
) -> Option<Picture> {
    let gemms = gemms(plan, context, prices);
    let peak = profile.peak_flops_per_s(context.compute_dtype());
    let bandwidth = profile.file().device.memory_bandwidth_bytes_per_s;
    let points = || gemms.iter().flat_map(|gemm| std::iter::once(&gemm.shard).chain(&gemm.whole));
    let ridge = peak / bandwidth;
    let intensities = points().map(|point| point.intensity).chain([ridge]);
    let x = Scale::logarithmic(intensities, ROOM[0])?;
    let rates = points().flat_map(|point| point.interval).chain([peak]);
    let y = Scale::logarithmic(rates, ROOM[1])?;
    if gemms.is_empty() {
        return None;
    }
    let unit = RateUnit::of(peak);
    let mut plot = RooflinePlot { picture: Picture::new(SIZE), x, y, unit };
    plot.axes(title, context);
    plot.roof(peak, bandwidth);
    plot.gemms(gemms, peak, bandwidth);
    Some(plot.picture)
}

/// The GEMMs of the forward pass, in order.
fn gemms(plan: &SegmentPlan, context: &Context, prices: &Prices) -> Vec<OpGemm> {
    let segment = &plan.segment;
    let alone = Context { mesh: Mesh { tensor: 1, ..context.mesh }, ..*context };
    let edge = EdgeLayout {
        forward: Layout::Replicated,
        backward: Layout::Replicated,
        norm_pending: false,
    };
    let point = |choice: &OpChoice, id, context: &Context| {
        let kernels = op_forward(segment, id, choice, context).into_iter();
        kernels.map(|template| template.kernel()).find_map(|kernel| match &kernel {
            Kernel::Gemm(gemm) => Some(RooflinePoint::of(gemm, &kernel, prices)),
            _ => None,
        })
    };
    let gemm = |id| {
        let node = segment.op(id);
        let choice = &plan.choice.ops[id.0 as usize].choice;
        let shard = point(choice, id, context)?;
        let whole = OpChoice {
            strategy: Strategy::Replicate,
            inputs: vec![edge; node.inputs.len()],
            outputs: vec![edge; node.outputs.len()],
        };
        let whole = (context.tensor_size() > 1).then(|| point(&whole, id, &alone)).flatten();
        Some(OpGemm { name: node.name.clone(), shard, whole })
    };
    segment.op_ids().filter_map(gemm).collect()
}

impl RooflinePoint {
    fn of(gemm: &Gemm, kernel: &Kernel, prices: &Prices) -> RooflinePoint {
        let rate = gemm.flops().0 / prices.kernel_time(kernel).0;
        let factor = 1.0 + prices.relative_half_width(kernel);
        RooflinePoint {
            intensity: gemm.flops().0 / gemm.traffic().as_f64(),
            rate,
            interval: [rate / factor, rate * factor],
        }
    }
}

struct RooflinePlot {
    picture: Picture,
    x: Scale,
    y: Scale,
    unit: RateUnit,
}

/// Unit in which rates are written.
#[derive(Clone, Copy)]
struct RateUnit {
    prefix: &'static str,
    factor: f64,
}

impl RateUnit {
    /// The unit for rates of this size.
    fn of(rate: f64) -> RateUnit {
        match rate {
            1e12.. => RateUnit { prefix: "T", factor: 1e12 },
            _ => RateUnit { prefix: "G", factor: 1e9 },
        }
    }
}

impl RooflinePlot {
    fn place(&self, intensity: f64, rate: f64) -> Place {
        let across = self.x.position(intensity).clamp(0.0, 1.0) * f64::from(RIGHT - LEFT);
        let up = self.y.position(rate).clamp(0.0, 1.0) * f64::from(BOTTOM - TOP);
        (LEFT + across.round() as i32, BOTTOM - up.round() as i32)
    }

    fn axes(&mut self, title: &str, context: &Context) {
        let picture = &mut self.picture;
        picture.text(title, (20, 20), Anchor::Start, 19);
        let tensor = context.tensor_size();
        let mut legend = vec![(PALETTE[0], format!("shard on one of {tensor} devices"))];
        match tensor {
            1 => legend[0].1 = "GEMM on one device".into(),
            _ => legend.push((PALETTE[1], "whole GEMM on one device".into())),
        }
        for (index, (colour, name)) in legend.into_iter().enumerate() {
            let left = 24 + 240 * index as i32;
            picture.disc((left + 4, 61), 5, colour);
            picture.text(name, (left + 16, 55), Anchor::Start, 14);
        }
        for (tick, name) in self.x.labelled_ticks() {
            let across = self.place(tick, 1.0).0;
            self.picture.path([(across, TOP), (across, BOTTOM)], GRID, 1);
            self.picture.text(name, (across, BOTTOM + 9), Anchor::Middle, 14);
        }
        let rates = self.y.ticks();
        let scaled: Vec<f64> = rates.iter().map(|tick| tick / self.unit.factor).collect();
        for (tick, name) in rates.into_iter().zip(labels(&scaled)) {
            let height = self.place(1.0, tick).1;
            self.picture.path([(LEFT, height), (RIGHT, height)], GRID, 1);
            self.picture.text(name, (LEFT - 8, height - 8), Anchor::End, 14);
        }
        let middle = ((LEFT + RIGHT) / 2, BOTTOM + 34);
        let name = "arithmetic intensity in FLOPs per byte of memory traffic";
        self.picture.text(name, middle, Anchor::Middle, 15);
        let name = format!("{}FLOP/s of one device", self.unit.prefix);
        self.picture.vertical_text(name, (22, (TOP + BOTTOM) / 2), 15);
        self.picture.text("whiskers: 90 % interval", (NAMES, BOTTOM + 34), Anchor::Start, 13);
    }

    /// The roof: memory bandwidth up to the ridge, then the peak.
    fn roof(&mut self, peak: f64, bandwidth: f64) {
        let ends = [self.x.low(), peak / bandwidth, self.x.high()];
        // Below the lowest rate, the slope of the bandwidth is outside of the picture.
        let first = ends[0].max(self.y.low() / bandwidth);
        let roof = [first, ends[1], ends[2]].map(|x| self.place(x, peak.min(bandwidth * x)));
        self.picture.path(roof, INK, 2);
        let RateUnit { prefix, factor } = self.unit;
        let peak_name = format!("peak {} {prefix}FLOP/s", label(peak / factor));
        self.picture.text(peak_name, (roof[2].0, roof[2].1 - 20), Anchor::End, 13);
        let middle = (first * ends[1]).sqrt();
        let (x, y) = self.place(middle, bandwidth * middle);
        let RateUnit { prefix, factor } = RateUnit::of(bandwidth);
        let name = format!("memory {} {prefix}B/s", rounded(bandwidth / factor));
        // Above the roof there are no points, but near the axis there is no room.
        let (place, anchor) = match x - LEFT > NAME_WIDTH {
            true => ((x - 12, y - 20), Anchor::End),
            false => ((x + 12, y), Anchor::Start),
        };
        self.picture.text(name, place, anchor, 13);
    }

    /// Points with whiskers and numbers, their names at the right, and lines between shards and their whole GEMMs.
    fn gemms(&mut self, gemms: Vec<OpGemm>, peak: f64, bandwidth: f64) {
        for OpGemm { shard, whole, .. } in &gemms {
            if let Some(whole) = whole {
                let ends = [shard, whole].map(|point| self.place(point.intensity, point.rate));
                self.picture.faint_path(ends, INK, 1, OPACITY);
                self.point(whole, PALETTE[1]);
            }
        }
        gemms.iter().for_each(|gemm| self.point(&gemm.shard, PALETTE[0]));
        let points = gemms.iter().flat_map(|gemm| std::iter::once(&gemm.shard).chain(&gemm.whole));
        let whisker =
            |point: &RooflinePoint| point.interval.map(|rate| self.place(point.intensity, rate));
        let whiskers: Vec<[Place; 2]> = points.map(whisker).collect();
        let named = gemms.iter().map(|OpGemm { name, shard, .. }| {
            let roof = peak.min(bandwidth * shard.intensity);
            let RateUnit { prefix, factor } = self.unit;
            let (rate, share) = (rounded(shard.rate / factor), percent(shard.rate / roof));
            let name = format!("{name}: {rate} {prefix}FLOP/s, {share} of roof");
            (self.place(shard.intensity, shard.rate), name)
        });
        let named = named.collect();
        name_points(&mut self.picture, NAMES, [TOP, BOTTOM], named, &whiskers);
    }

    fn point(&mut self, point: &RooflinePoint, colour: RGBColor) {
        let ends = point.interval.map(|rate| self.place(point.intensity, rate));
        self.picture.faint_path(ends, colour, 1, OPACITY);
        for (x, y) in ends {
            self.picture.faint_path([(x - CAP, y), (x + CAP, y)], colour, 1, OPACITY);
        }
        self.picture.disc(self.place(point.intensity, point.rate), 5, colour);
    }
}
