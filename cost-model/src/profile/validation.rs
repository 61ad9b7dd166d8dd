//! Validation of profile files.
//!
//! The ranges are wide enough for any hardware and narrow enough that every price is finite.

use std::collections::HashMap;
use std::hash::Hash;
use std::ops::RangeInclusive;

use narrows_plan::{DType, Defect, Defects, Kernel, is_display_control, short_number};

use super::checked::Profile;
use super::executors::ExecutorSpecs;
use super::file::{AttentionCurve, DeviceSpec, EfficiencyPoint, GemmCurve, ProfileFile};
use super::links::LinkSpec;
use super::measured::{KernelMeasurements, Repeatability};
use super::presets::{fitted_shapes, preset_names};
use super::provenance::{Provenance, ProvenanceKind, RELATIVE_ERROR_MAX, RelativeError};
use super::refits::BootstrapRefits;

/// FLOPs per second: from a microcontroller to a thousand times an H100.
const FLOPS: RangeInclusive<f64> = 1e3..=1e18;
/// Dollars for a device and an hour: a larger price is a mistake in a unit.
pub const DOLLARS_PER_HOUR: RangeInclusive<f64> = 0.0..=1e6;
/// Bytes per second.
const BANDWIDTH: RangeInclusive<f64> = 1e3..=1e18;
/// Efficiencies: a value below 1e-4 is a mistake in a unit.
const EFFICIENCY: RangeInclusive<f64> = 1e-4..=1.0;
/// Latencies in seconds.
const LATENCY_S: RangeInclusive<f64> = 0.0..=10.0;
/// Threads of a host for a device.
const HOST_THREADS: RangeInclusive<f64> = 1.0..=4096.0;
/// Operations or bytes of a host in a second.
const HOST_RATE: RangeInclusive<f64> = 1e3..=1e16;
/// Slowdown factors of overlapped work.
const SLOWDOWN: RangeInclusive<f64> = 1.0..=10.0;
/// Seconds of a measured kernel: more than zero, less than three hours.
const TIME_S: RangeInclusive<f64> = 1e-10..=1e4;
/// Largest number of measured points: every price reads all of them.
const POINTS_MAX: usize = 20_000;
/// Relative half-widths. Measurements on a busy machine show factors of thousands.
const HALF_WIDTH: RangeInclusive<f64> = 0.0..=RELATIVE_ERROR_MAX;
/// Sum of a step's instructions over the step: at most 1, apart from the overhead of reading the clock.
const UNDISTURBED: RangeInclusive<f64> = 0.0..=1.1;
/// Logarithms of ratios: wide enough for a busy machine, narrow enough that no draw overflows.
const RESIDUAL: RangeInclusive<f64> = -20.0..=20.0;
/// Largest number of bootstrap draws: every prediction prices each of them.
const DRAWS_MAX: usize = 1000;

impl ProfileFile {
    /// Validates every number.
    ///
    /// # Errors
    /// All defects at once, each with the path of its field.
    pub fn resolve(self) -> Result<Profile, Defects> {
        let mut check = ProfileValidator::default();
        check.name(&self.name);
        check.printable("description", &self.description);
        if let Some(price) = self.price_per_device_hour {
            check.within("price_per_device_hour", price, DOLLARS_PER_HOUR);
        }
        check.device(&self.device);
        check.gemm(&self.gemm);
        check.attention(&self.attention);
        check.efficiency("passes.efficiency", self.fused.efficiency);
        check.latency("passes.start_s", self.fused.start_s);
        check.relative_error("passes.relative_error", &self.fused.relative_error);
        check.provenance("passes", &self.fused.provenance);
        check.links(&self.links);
        let ExecutorSpecs { captured, compiled, eager } = &self.executors;
        let present =
            [("captured", Some(captured)), ("compiled", compiled.as_ref()), ("eager", Some(eager))];
        for (name, costs) in present.into_iter().filter_map(|(name, costs)| Some((name, costs?))) {
            let path = format!("executors.{name}");
            check.latency(&format!("{path}.launch_gap_s"), costs.launch_gap_s);
            check.latency(&format!("{path}.host_launch_s"), costs.host_launch_s);
            check.within(&format!("{path}.step_factor"), costs.step_factor, 0.5..=5.0);
            check.within(&format!("{path}.step_s"), costs.step_s, 0.0..=10.0);
            check.provenance(&path, &costs.provenance);
            if let Some(error) = &costs.step_error {
                check.relative_error(&format!("{path}.step_error"), error);
            }
        }
        if let Some(overlap) = &self.overlap {
            check.within("overlap.compute_slowdown", overlap.compute_slowdown, SLOWDOWN);
            check.within("overlap.collective_slowdown", overlap.collective_slowdown, SLOWDOWN);
            check.provenance("overlap", &overlap.provenance);
        }
        if let Some(host) = &self.host {
            check.within("host.threads_per_device", host.threads_per_device as f64, HOST_THREADS);
            for (field, rate) in [
                ("host.flops_per_s", host.flops_per_s),
                ("host.copy_bytes_per_s", host.copy_bytes_per_s),
                ("host.network_bytes_per_s", host.network_bytes_per_s),
            ] {
                check.within(field, rate, HOST_RATE);
            }
            check.provenance("host", &host.provenance);
        }
        check.assumed_fields(&self);
        if let Some(measured) = &self.measured {
            check.measured(measured);
        }
        if let Some(refits) = &self.refits {
            check.refits(refits, &self);
        }
        if let Some(name) = &self.form_of {
            check.form_of(name);
        }
        check.defects.into_result(()).map(|()| Profile::new(self))
    }
}

/// Collects the defects of a file.
#[derive(Default)]
struct ProfileValidator {
    defects: Defects,
}

impl ProfileValidator {
    fn defect(&mut self, field: &str, problem: String) {
        self.defects.push(Defect::new(field, problem));
    }

    /// Checks a number against a range. No range contains NaN or an infinity.
    fn within(&mut self, field: &str, value: f64, range: RangeInclusive<f64>) {
        if !range.contains(&value) {
            let [value, low, high] = [value, *range.start(), *range.end()].map(short_number);
            self.defect(field, format!("{value} is not between {low} and {high}"));
        }
    }

    /// Checks that text is safe to print on a terminal.
    fn printable(&mut self, field: &str, text: &str) {
        if text.chars().any(is_display_control) {
            self.defect(field, "contains a control character or a line break".into());
        }
    }

    fn efficiency(&mut self, field: &str, value: f64) {
        self.within(field, value, EFFICIENCY);
    }

    fn latency(&mut self, field: &str, value: f64) {
        self.within(field, value, LATENCY_S);
    }

    fn count(&mut self, field: &str, value: u32, max: u32) {
        if !(1..=max).contains(&value) {
            self.defect(field, format!("{value} is not between 1 and {max}"));
        }
    }

    fn name(&mut self, name: &str) {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
        if name.is_empty() || !name.chars().all(legal) {
            self.defects.push(
                Defect::new("name", format!("`{name}` is not a valid name"))
                    .hint("lower-case letters, digits, `-`, `_` and `.`"),
            );
        }
    }

    fn provenance(&mut self, group: &str, provenance: &Provenance) {
        if provenance.source.trim().is_empty() {
            self.defect(
                &format!("{group}.provenance.source"),
                "is empty: name the source of the numbers".to_string(),
            );
        }
        self.printable(&format!("{group}.provenance.source"), &provenance.source);
        if !is_date(&provenance.date) {
            let problem = format!("`{}` is not a date in the form YYYY-MM-DD", provenance.date);
            self.defect(&format!("{group}.provenance.date"), problem);
        }
    }

    /// Checks that every field in the `assumed` list of a provenance is a number of its group.
    fn assumed_fields(&mut self, file: &ProfileFile) {
        let value = serde_json::to_value(file).unwrap_or_default();
        let groups = file.groups();
        for (path, provenance) in &groups {
            let field = format!("{path}.provenance.assumed");
            let numbers = number_paths(&value, path, &groups);
            for name in &provenance.assumed {
                if provenance.kind == ProvenanceKind::Assumed {
                    let problem = format!("lists `{name}`, but the whole group is assumed");
                    self.defect(&field, problem);
                } else if !numbers.contains(name) {
                    let problem = format!("`{name}` is not a number of this group");
                    let defect = Defect::new(field.clone(), problem).hint(numbers.join(", "));
                    self.defects.push(defect);
                }
            }
        }
    }

    fn relative_error(&mut self, path: &str, error: &RelativeError) {
        self.within(&format!("{path}.half_width_90"), error.half_width_90, HALF_WIDTH);
        for (index, residual) in error.residuals.iter().enumerate() {
            self.within(&format!("{path}.residuals[{index}]"), *residual, RESIDUAL);
        }
        self.provenance(path, &error.provenance);
    }

    fn form_of(&mut self, name: &str) {
        if fitted_shapes(name).is_none() {
            let problem = format!("`{name}` is not a preset with measured shapes");
            let known = preset_names().filter(|name| fitted_shapes(name).is_some());
            let hint = known.collect::<Vec<_>>().join(", ");
            self.defects.push(Defect::new("form_of", problem).hint(hint));
        }
    }

    fn device(&mut self, device: &DeviceSpec) {
        if device.memory_bytes.0 == 0 {
            self.defect("device.memory_bytes", "must be greater than zero".to_string());
        } else if device.reserve.bytes >= device.memory_bytes {
            let problem = format!(
                "{} is not less than the device's {}",
                device.reserve.bytes, device.memory_bytes
            );
            self.defect("device.reserve.bytes", problem);
        }
        let bandwidth = device.memory_bandwidth_bytes_per_s;
        self.within("device.memory_bandwidth_bytes_per_s", bandwidth, BANDWIDTH);
        self.within("device.peak_flops_per_s.bf16", device.peak_flops_per_s.bf16, FLOPS);
        self.within("device.peak_flops_per_s.f32", device.peak_flops_per_s.f32, FLOPS);
        self.count("device.compute_units", device.compute_units, 1_000_000);
        self.provenance("device.reserve", &device.reserve.provenance);
        self.provenance("device", &device.provenance);
    }

    fn gemm(&mut self, gemm: &GemmCurve) {
        self.efficiency("gemm.efficiency_max", gemm.efficiency_max);
        self.efficiency("gemm.memory_efficiency", gemm.memory_efficiency);
        self.within("gemm.exposed_epilogue", gemm.exposed_epilogue, 0.0..=100.0);
        self.within("gemm.tile_overhead_elements", gemm.tile_overhead_elements, 0.0..=1e4);
        self.latency("gemm.start_s", gemm.start_s);
        if gemm.tiles.is_empty() || gemm.tiles.len() > 32 {
            let problem = format!("{} tiles: give 1 to 32", gemm.tiles.len());
            self.defect("gemm.tiles", problem);
        }
        for (index, tile) in gemm.tiles.iter().enumerate() {
            self.count(&format!("gemm.tiles[{index}].rows"), tile.rows, 4096);
            self.count(&format!("gemm.tiles[{index}].columns"), tile.columns, 4096);
        }
        if gemm.operands == Some(DType::U32) {
            self.defect("gemm.operands", "`u32` is not a format of GEMMs: give bf16 or f32".into());
        }
        self.relative_error("gemm.relative_error", &gemm.relative_error);
        if let Some(growth) = &gemm.error_growth {
            self.within("gemm.error_growth.per_octave", growth.per_octave, 0.0..=10.0);
            self.provenance("gemm.error_growth", &growth.provenance);
        }
        self.provenance("gemm", &gemm.provenance);
    }

    fn attention(&mut self, attention: &AttentionCurve) {
        self.efficiency_curve("attention.forward", &attention.forward);
        self.efficiency_curve("attention.backward", &attention.backward);
        self.within("attention.head_dim_half", attention.head_dim_half, 0.0..=4096.0);
        self.latency("attention.start_s", attention.start_s);
        self.relative_error("attention.relative_error", &attention.relative_error);
        self.provenance("attention", &attention.provenance);
    }

    /// Checks that lengths increase, and that the efficiency at most doubles when the length doubles: the work
    /// quadruples, and a longer sequence must never be faster.
    fn efficiency_curve(&mut self, path: &str, points: &[EfficiencyPoint]) {
        if points.is_empty() {
            self.defect(path, "has no points".to_string());
        }
        for (index, point) in points.iter().enumerate() {
            self.efficiency(&format!("{path}[{index}].efficiency"), point.efficiency);
            if point.length == 0 {
                self.defect(&format!("{path}[{index}].length"), "must be greater than zero".into());
            }
        }
        for (index, pair) in points.windows(2).enumerate() {
            let point = format!("{path}[{}]", index + 1);
            if pair[1].length <= pair[0].length {
                let problem =
                    format!("{} after {}: lengths must increase", pair[1].length, pair[0].length);
                self.defect(&format!("{point}.length"), problem);
                continue;
            }
            let octaves = (pair[1].length as f64 / pair[0].length as f64).log2();
            if pair[1].efficiency - pair[0].efficiency > pair[0].efficiency * octaves {
                let problem = format!(
                    "{} after {} would make longer sequences faster",
                    pair[1].efficiency, pair[0].efficiency
                );
                self.defect(&format!("{point}.efficiency"), problem);
            }
        }
    }

    fn measured(&mut self, measured: &KernelMeasurements) {
        self.printable("measured.machine", measured.machine.as_deref().unwrap_or_default());
        if let Some(threads) = measured.threads {
            self.count("measured.threads", threads, 65_536);
        }
        if measured.points.is_empty() || measured.points.len() > POINTS_MAX {
            let count = measured.points.len();
            let problem = format!("{count} points: give 1 to {POINTS_MAX}");
            self.defect("measured.points", problem);
        }
        for (index, point) in measured.points.iter().enumerate() {
            let path = format!("measured.points[{index}]");
            self.within(&format!("{path}.time_s"), point.time_s, TIME_S);
            self.within(&format!("{path}.spread"), point.spread, 0.0..=1e6);
            if !(1..=65_536).contains(&point.devices) {
                let problem = format!("{} is not between 1 and 65536", point.devices);
                self.defect(&format!("{path}.devices"), problem);
            }
        }
        if let Some(steps) = &measured.steps {
            self.relative_error("measured.steps", steps);
        }
        if let Some(Repeatability { rounds, rounds_apart_median, rounds_apart_90, undisturbed }) =
            measured.repeatability
        {
            let path = "measured.repeatability";
            self.count(&format!("{path}.rounds"), rounds, 1_000_000);
            for (name, apart) in
                [("rounds_apart_median", rounds_apart_median), ("rounds_apart_90", rounds_apart_90)]
            {
                self.within(&format!("{path}.{name}"), apart, 0.0..=1e6);
            }
            self.within(&format!("{path}.undisturbed"), undisturbed, UNDISTURBED);
        }
        let points = measured.points.iter().map(|point| (&point.kernel, point.devices));
        self.unique_items("measured.points", points);
        for (index, point) in measured.points.iter().enumerate() {
            let Kernel::Attention(attention) = &point.kernel else { continue };
            if !attention.has_equal_query_parts() {
                let problem = format!(
                    "{} tokens are not two equal chunks of queries for each of {} devices",
                    attention.length, attention.query_parts
                );
                let path = format!("measured.points[{index}].kernel.query_parts");
                self.defects.push(Defect::new(path, problem).hint("1 for all queries"));
            }
            if attention.ring.is_some() {
                let problem =
                    "ring attention is priced by its steps, and no measurement corrects it";
                let path = format!("measured.points[{index}].kernel");
                self.defects.push(Defect::new(path, problem).hint("omit this point"));
            }
        }
        if measured.provenance.kind != ProvenanceKind::Measured {
            self.defects.push(
                Defect::new("measured.provenance.kind", "`measured` holds measurements only")
                    .hint("measured"),
            );
        }
        self.provenance("measured", &measured.provenance);
    }

    /// Checks that no kernel is listed twice: a duplicate would weigh twice.
    fn unique_items<T: Hash + Eq>(&mut self, path: &str, items: impl Iterator<Item = T>) {
        let mut seen = HashMap::new();
        for (index, item) in items.enumerate() {
            let first = *seen.entry(item).or_insert(index);
            if first != index {
                self.defects.push(
                    Defect::new(
                        format!("{path}[{index}]"),
                        format!("repeats the kernel of {path}[{first}]"),
                    )
                    .hint("give each kernel once for each number of devices, with its mean time"),
                );
            }
        }
    }

    /// Checks that the parameters of every draw make a valid profile.
    fn refits(&mut self, refits: &BootstrapRefits, file: &ProfileFile) {
        if file.measured.is_some() {
            let problem = "numbers cannot be fitted both to published figures (`refits`) and to the profile's own \
                           points (`measured`)";
            self.defects.push(Defect::new("refits", problem).hint("remove one of the two"));
        }
        self.unique_items("refits.kernels", refits.kernels.iter());
        let (draws, kernels) = (refits.draws.len(), refits.kernels.len());
        for (name, count, max) in [("draws", draws, DRAWS_MAX), ("kernels", kernels, POINTS_MAX)] {
            if !(1..=max).contains(&count) {
                let problem = format!("{count} {name}: give 1 to {max}");
                self.defect(&format!("refits.{name}"), problem);
            }
        }
        let (fitted, parameters) = (refits.fitted.len(), refits.parameters.len());
        if fitted != 0 && fitted != parameters {
            self.defect("refits.fitted", format!("{fitted} values for {parameters} numbers"));
        }
        for (index, draw) in refits.draws.iter().enumerate() {
            if draw.len() != refits.parameters.len() {
                let problem =
                    format!("{} values for {} numbers", draw.len(), refits.parameters.len());
                self.defect(&format!("refits.draws[{index}]"), problem);
            }
        }
        if !self.defects.0.is_empty() {
            return;
        }
        for (index, refit) in file.refitted().into_iter().enumerate() {
            let mut check = ProfileValidator::default();
            check.gemm(&refit.gemm);
            check.links(&refit.links);
            for defect in check.defects.0 {
                let problem = format!("{}: {}", defect.field, defect.problem);
                self.defect(&format!("refits.draws[{index}]"), problem);
            }
        }
        self.provenance("refits", &refits.provenance);
    }

    fn links(&mut self, links: &LinkSpec) {
        self.count("links.devices_per_node", links.devices_per_node, 65_536);
        let intra = &links.intra_node;
        let bandwidth = intra.bandwidth_bytes_per_s;
        self.within("links.intra_node.bandwidth_bytes_per_s", bandwidth, BANDWIDTH);
        self.efficiency("links.intra_node.efficiency", intra.efficiency);
        self.latency("links.intra_node.fill_s", intra.fill_s);
        self.within("links.intra_node.fill_half_bytes", intra.fill_half_bytes, 0.0..=1e12);
        self.provenance("links.intra_node", &intra.provenance);
        let inter = &links.inter_node;
        self.count("links.inter_node.nics_per_node", inter.nics_per_node, 65_536);
        let bandwidth = inter.bandwidth_bytes_per_s;
        self.within("links.inter_node.bandwidth_bytes_per_s", bandwidth, BANDWIDTH);
        self.efficiency("links.inter_node.efficiency", inter.efficiency);
        self.latency("links.inter_node.extra_latency_s", inter.extra_latency_s);
        self.relative_error("links.inter_node.relative_error", &inter.relative_error);
        self.provenance("links.inter_node", &inter.provenance);
        self.relative_error("links.relative_error", &links.relative_error);
    }
}

/// Paths of the numbers of a group relative to the group, nested objects included that are not groups themselves.
fn number_paths(
    file: &serde_json::Value,
    group: &str,
    groups: &[(&str, &Provenance)],
) -> Vec<String> {
    fn collect(
        value: &serde_json::Value,
        path: &str,
        is_group: &dyn Fn(&str) -> bool,
    ) -> Vec<String> {
        let serde_json::Value::Object(fields) = value else { return vec![] };
        let dot = if path.is_empty() { "" } else { "." };
        let paths = |(key, value): (&String, &serde_json::Value)| {
            let path = format!("{path}{dot}{key}");
            match value {
                serde_json::Value::Number(_) => vec![path],
                serde_json::Value::Object(_) if !is_group(&path) => collect(value, &path, is_group),
                _ => vec![],
            }
        };
        fields.iter().flat_map(paths).collect()
    }
    let is_group = |path: &str| groups.iter().any(|(known, _)| *known == format!("{group}.{path}"));
    let value = group.split('.').try_fold(file, |value, key| value.get(key));
    value.map(|value| collect(value, "", &is_group)).unwrap_or_default()
}

/// Whether `text` has the form of a date. The length of the month is not checked.
fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let [year, month, day] = parts[..] else { return false };
    let number = |part: &str, digits: usize, range: RangeInclusive<u32>| {
        part.len() == digits
            && part.bytes().all(|byte| byte.is_ascii_digit())
            && part.parse().is_ok_and(|value| range.contains(&value))
    };
    number(year, 4, 1990..=9999) && number(month, 2, 1..=12) && number(day, 2, 1..=31)
}
