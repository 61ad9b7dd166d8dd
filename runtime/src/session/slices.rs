//! Slices of parameters: what one device holds of a tensor, so that all processes can save and load at once and none
//! holds the whole.
//!
//! The shard of a parameter on a device is a rectangle of the tensor: equally long runs of elements at equal distances.
//! With ZeRO a replica holds a range of the rectangle's elements, counted row by row. Where replicas hold the same
//! elements, each saves an equal share of them.

use std::collections::BTreeMap;
use std::ops::Range;

use narrows_plan::model::ParameterId;
use narrows_plan::program::{Buffer, Program};
use serde::{Deserialize, Serialize};

use super::Session;
use super::coordinates::MeshCoordinates;
use super::sharded_parameter::ShardedParameter;
use super::tensors::{ReplicaWindow, TensorKind, element_count, stage_of};

use crate::error::RunError;
use crate::report::DeviceId;

/// Elements of a tensor. Element i of the slice is element `first + q·stride + r` of the row-major tensor, where q and r are
/// quotient and remainder of `from + i` and `run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSlice {
    /// First element of the rectangle.
    pub first: u64,
    /// Elements of a run of the rectangle; not 0.
    pub run: u64,
    /// Distance between the starts of consecutive runs; at least a run.
    pub stride: u64,
    /// Elements of the rectangle before the slice.
    pub from: u64,
    /// Elements of the slice.
    pub count: u64,
}

/// A slice that a device of this process holds.
#[derive(Clone, Debug)]
pub struct LocalSlice {
    /// The parameter.
    pub id: ParameterId,
    /// The elements of the slice.
    pub slice: TensorSlice,
    device: u64,
    /// Index of the buffer in its stage.
    buffer: usize,
    /// Ranges of the buffer that hold the elements, in their order.
    ranges: Vec<Range<usize>>,
}

/// A part of a slice that a buffer needs.
struct SliceOverlap {
    /// First element in the slice.
    source: usize,
    /// First element in the buffer.
    target: usize,
    length: usize,
}

/// A run of a parameter's elements, and its place in a buffer.
type BufferRun = (Range<u64>, Range<usize>);

/// A run of a shard's elements, and the part of it that a device saves.
type ShardRun = (Range<u64>, Option<BufferRun>);

impl TensorSlice {
    /// Whether the slice lies in a tensor of so many elements.
    pub fn fits(&self, elements: u64) -> bool {
        let last = || {
            let last = self.from.checked_add(self.count.checked_sub(1)?)?;
            let (row, column) = (last.checked_div(self.run)?, last.checked_rem(self.run)?);
            self.first.checked_add(row.checked_mul(self.stride)?)?.checked_add(column)
        };
        self.run > 0 && self.stride >= self.run && last().is_some_and(|last| last < elements)
    }

    /// Ranges of the tensor's elements that the slice has, in ascending order. The slice must [fit](TensorSlice::fits) the tensor.
    pub fn element_ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let TensorSlice { first, run, stride, from, count } = *self;
        let is_contiguous = stride == run;
        let end = from + count;
        let mut position = from;
        std::iter::from_fn(move || {
            let (row, column) = (position / run, position % run);
            let left = end - position;
            let length = if is_contiguous { left } else { left.min(run - column) };
            position += length;
            let start = first + row * stride + column;
            (length > 0).then_some(start..start + length)
        })
    }

    /// Copies the elements of the slice to their places in the whole tensor.
    pub fn copy_to_whole(&self, values: &[f32], tensor: &mut [f32]) {
        let mut copies = vec![];
        self.copies_to(&(0..tensor.len() as u64), 0, &mut copies);
        for SliceOverlap { source, target, length } in copies {
            tensor[target..][..length].copy_from_slice(&values[source..][..length]);
        }
    }

    /// The parts of the slice that lie in a run, which begins at `target` of a buffer.
    fn copies_to(&self, elements: &Range<u64>, target: usize, copies: &mut Vec<SliceOverlap>) {
        let end_of_slice = self.from + self.count;
        let mut at = elements.start.max(self.first);
        while at < elements.end {
            let (row, column) = ((at - self.first) / self.stride, (at - self.first) % self.stride);
            if column >= self.run {
                at += self.stride - column;
                continue;
            }
            let position = row * self.run + column;
            if position >= end_of_slice {
                return;
            }
            let length = (self.run - column).min(elements.end - at);
            let (start, end) = (position.max(self.from), (position + length).min(end_of_slice));
            if start < end {
                copies.push(SliceOverlap {
                    source: (start - self.from) as usize,
                    target: target + (at - elements.start + start - position) as usize,
                    length: (end - start) as usize,
                });
            }
            at += length;
        }
    }
}

/// Number of elements of weights and moments that a device saves in a run of several processes. Those of all devices are
/// every element once.
pub fn saved_elements(program: &Program, device: DeviceId) -> u64 {
    let stage = &program.stages[device.stage(&program.context.mesh)];
    let of_kind = |kind: TensorKind| {
        let buffers = kind.indexed_master_buffers(stage);
        let slices =
            buffers.flat_map(|(index, buffer)| slices_of_buffer(program, device.0, index, buffer));
        slices.map(|slice| slice.slice.count).sum::<u64>()
    };
    [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments]
        .into_iter()
        .map(of_kind)
        .sum()
}

impl Session {
    /// The slices that the devices of this process save. Those of all processes are every element of every parameter once.
    pub fn local_slices(&self, kind: TensorKind) -> Vec<LocalSlice> {
        let program = self.program();
        let mut slices = vec![];
        for device in self.devices() {
            let stage = stage_of(&self.program, device);
            for (index, buffer) in kind.indexed_master_buffers(stage) {
                slices.extend(slices_of_buffer(program, device, index, buffer));
            }
        }
        slices
    }

    /// The elements of a slice of this process.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn read_slice(&self, slice: &LocalSlice) -> Result<Vec<f32>, RunError> {
        let buffer = &stage_of(&self.program, slice.device).buffers[slice.buffer];
        let elements = self.engine.read_buffer(slice.device, buffer)?;
        Ok(slice.ranges.iter().flat_map(|range| &elements[range.clone()]).copied().collect())
    }

    /// Sets tensors from stored slices. `read` returns the elements of a slice; it is called for those only of which a
    /// device of this process needs a part, once for each buffer.
    ///
    /// # Errors
    /// Errors of `read`; the result of `incomplete` where the slices of a parameter have a gap; that of `lost` where a device
    /// fails.
    pub fn load_slices<L, E>(
        &mut self,
        kind: TensorKind,
        stored: &BTreeMap<ParameterId, Vec<(TensorSlice, L)>>,
        mut read: impl FnMut(&TensorSlice, &L) -> Result<Vec<f32>, E>,
        incomplete: impl Fn(ParameterId) -> E,
        lost: impl Fn(RunError) -> E,
    ) -> Result<(), E> {
        let program = self.program.clone();
        for device in self.engine.devices() {
            let stage = stage_of(&program, device);
            for buffer in kind.buffers(stage) {
                let mut parts = vec![];
                for (id, runs) in runs_of_buffer(program.program(), device, buffer) {
                    let needed: usize = runs.iter().map(|(_, range)| range.len()).sum();
                    let mut found = 0;
                    for (slice, location) in stored.get(&id).into_iter().flatten() {
                        let mut copies = vec![];
                        for (elements, range) in &runs {
                            slice.copies_to(elements, range.start, &mut copies);
                        }
                        if !copies.is_empty() {
                            found += copies.iter().map(|copy| copy.length).sum::<usize>();
                            parts.push((read(slice, location)?, copies));
                        }
                    }
                    if found != needed {
                        return Err(incomplete(id));
                    }
                }
                let set = |elements: &mut [f32]| {
                    for (values, copies) in &parts {
                        for SliceOverlap { source, target, length } in copies {
                            elements[*target..][..*length]
                                .copy_from_slice(&values[*source..][..*length]);
                        }
                    }
                };
                self.engine.modify_buffer(device, buffer, &mut { set }).map_err(&lost)?;
            }
        }
        Ok(())
    }
}

/// The runs of each parameter that a device's buffer holds.
fn runs_of_buffer(
    program: &Program,
    device: u64,
    buffer: &Buffer,
) -> BTreeMap<ParameterId, Vec<BufferRun>> {
    let mesh = program.context.mesh;
    let coordinates = MeshCoordinates::of_device(device, &mesh);
    let window = ReplicaWindow::new(buffer, program, coordinates.replica);
    let mut runs: BTreeMap<ParameterId, Vec<BufferRun>> = BTreeMap::new();
    if let Some(shards) =
        ShardedParameter::new(buffer, coordinates.tensor, mesh.tensor, program.tied)
    {
        shards.for_each_run(|id, elements, offset| {
            runs.entry(id).or_default().extend(window.intersect(elements, offset));
        });
    }
    runs
}

/// The slices of a buffer that a device saves.
fn slices_of_buffer(
    program: &Program,
    device: u64,
    index: usize,
    buffer: &Buffer,
) -> Vec<LocalSlice> {
    let mesh = program.context.mesh;
    let coordinates = MeshCoordinates::of_device(device, &mesh);
    let Some(shards) = ShardedParameter::new(buffer, coordinates.tensor, mesh.tensor, program.tied)
    else {
        return vec![];
    };
    let window = ReplicaWindow::new(buffer, program, coordinates.replica);
    let is_duplicate = (shards.is_replicated() && coordinates.tensor > 0)
        || window.is_duplicate_part()
        // The first stage has the embedding to which the head of the last is tied.
        || (shards.is_tied_head() && coordinates.stage > 0);
    if is_duplicate {
        return vec![];
    }
    let window = match window.is_whole() {
        true => {
            let (size, replicas) = (element_count(buffer) as u64, mesh.replicas());
            let share = |replica: u64| size * replica / replicas;
            ReplicaWindow::of_part(share(coordinates.replica)..share(coordinates.replica + 1))
        }
        false => window,
    };
    let mut members: BTreeMap<ParameterId, Vec<ShardRun>> = BTreeMap::new();
    shards.for_each_run(|id, elements, offset| {
        let part = window.intersect(elements.clone(), offset);
        members.entry(id).or_default().push((elements, part));
    });
    members
        .into_iter()
        .filter_map(|(id, runs)| {
            let first = runs[0].0.start;
            let run = runs[0].0.end - first;
            let stride = runs.get(1).map_or(run, |(elements, _)| elements.start - first);
            let mut parts = runs.iter().enumerate().filter_map(|(row, (elements, part))| {
                let (part, range) = part.as_ref()?;
                Some((row as u64 * run + part.start - elements.start, range.clone()))
            });
            let (from, range) = parts.next()?;
            let ranges: Vec<_> =
                std::iter::once(range).chain(parts.map(|(_, range)| range)).collect();
            let count = ranges.iter().map(|range| range.len() as u64).sum();
            let slice = TensorSlice { first, run, stride, from, count };
            Some(LocalSlice { id, slice, device, buffer: index, ranges })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_the_common_elements_in_order() {
        arbtest::arbtest(|draw| {
            let (columns, rows): (u64, u64) =
                (draw.int_in_range(1..=9)?, draw.int_in_range(1..=7)?);
            let run = draw.int_in_range(1..=columns)?;
            let first = draw.int_in_range(0..=columns - run)?;
            let from = draw.int_in_range(0..=run * rows - 1)?;
            let count = draw.int_in_range(1..=run * rows - from)?;
            let slice = TensorSlice { first, run, stride: columns, from, count };
            assert!(slice.fits(rows * columns) && !slice.fits(first));
            let start = draw.int_in_range(0..=rows * columns)?;
            let needed = start..draw.int_in_range(start..=rows * columns)?;
            let element = |i: u64| first + (from + i) / run * columns + (from + i) % run;
            let expected: Vec<(usize, usize)> = (0..count)
                .filter(|i| needed.contains(&element(*i)))
                .map(|i| (i as usize, 5 + (element(i) - start) as usize))
                .collect();
            let mut copies = vec![];
            slice.copies_to(&needed, 5, &mut copies);
            let pairs = copies
                .iter()
                .flat_map(|copy| (0..copy.length).map(|i| (copy.source + i, copy.target + i)));
            assert_eq!(pairs.collect::<Vec<_>>(), expected);
            Ok(())
        });
    }

    #[test]
    fn ranges_are_the_elements_of_the_slice() {
        arbtest::arbtest(|draw| {
            let run: u64 = draw.int_in_range(1..=9)?;
            let (stride, first) = (draw.int_in_range(run..=12)?, draw.int_in_range(0..=5)?);
            let (from, count) = (draw.int_in_range(0..=40)?, draw.int_in_range(1..=40)?);
            let slice = TensorSlice { first, run, stride, from, count };
            let element = |i: u64| first + (from + i) / run * stride + (from + i) % run;
            let expected: Vec<u64> = (0..count).map(element).collect();
            assert_eq!(slice.element_ranges().flatten().collect::<Vec<u64>>(), expected);
            let ranges = slice.element_ranges().count();
            assert!(stride > run || ranges == 1, "{ranges} ranges of one run of elements");
            Ok(())
        });
    }

    #[test]
    fn slices_of_damaged_files_do_not_fit() {
        let slice = TensorSlice { first: 0, run: 4, stride: 8, from: 0, count: 8 };
        assert!(slice.fits(12) && !slice.fits(11));
        for damaged in [
            TensorSlice { run: 0, ..slice },
            TensorSlice { stride: 3, ..slice },
            TensorSlice { count: 0, ..slice },
            TensorSlice { from: u64::MAX, ..slice },
            TensorSlice { stride: u64::MAX, ..slice },
        ] {
            assert!(!damaged.fits(12), "{damaged:?}");
        }
    }
}
