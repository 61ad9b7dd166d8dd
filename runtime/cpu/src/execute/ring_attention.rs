//! Ring attention: the steps of [`narrows_plan::ring`], each after its shift.
//!
//! Scratch memory of the instruction is two operands of the arena, as [`narrows_plan::ring::RingScratch`] describes them. A part
//! is the keys and values of a device, or their gradients, side by side: `[rows, 2·kv_heads·w]`.

use std::ops::Range;

use narrows_plan::kernel::{Attention, Collective, CollectiveKind, Direction};
use narrows_plan::ring::{RING_SCRATCH_OPERANDS, RingStepRows};
use narrows_plan::{Axis, Bytes, DeviceGroup};
use narrows_runtime::process_group::Communicator;
use narrows_runtime::session::PositionRuns;
use narrows_runtime::{DeviceReport, ScheduledInstruction, TimeCategory};

use super::attention::{HeadColumns, head_columns};
use super::operands::{view, view_mut, with_scratch};
use crate::abort::StopReason;
use crate::device::{CpuDevice, OperandRanges};
use crate::device_clock::DeviceClock;
use crate::kernels::{
    AttentionGradients, AttentionSaved, AttentionShape, MatrixView, MatrixViewMut, Parallel,
    attention_backward, attention_forward, merge_outputs,
};

pub(super) fn run(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    attention: &Attention,
    group: DeviceGroup,
) -> Result<(), StopReason> {
    let (reads, writes) = (&scheduled.instr.reads, &scheduled.instr.writes);
    let results = writes.len() - RING_SCRATCH_OPERANDS;
    let is_backward = attention.direction == Direction::Backward;
    let inputs = if is_backward { results } else { reads.len() };
    let columns = head_columns(device, &reads[..inputs], attention);
    let HeadColumns { shape, .. } = columns;
    let of_step = AttentionShape { length: shape.queries.count, ..shape };
    let site = device.site();
    let links = device.links;
    let Some(communicator) = links.communicator(&group) else {
        return Err(site.unsupported(scheduled, "its device group is not connected"));
    };
    let place = site.coordinates.position(Axis::Context, &site.program.context.mesh) as usize;
    let parallel = device.parallel;
    with_scratch(device, of_step.scratch_elements(parallel), |device, kernel_scratch| {
        let range = |access: &_| site.operand_range(scheduled, access);
        let read = OperandRanges::of(reads, range);
        let written = OperandRanges::of(writes, range);
        let CpuDevice { arena, report, clock, .. } = device;
        let Some(mut operands) = arena.operands(read.as_slice(), written.as_slice()) else {
            return Err(site.invalid_operands(scheduled));
        };
        let qkv = [0, 1, 2].map(|index| operands.read(index));
        let [q, k, v] = columns.split(&reads[..inputs], &qkv);
        let [parts, sums] = [0, 1].map(|index| operands.write(results + index));
        let part = shape.sequences * shape.queries.count * 2 * k.columns();
        let mut ring = Ring {
            shape,
            place,
            places: group.size as usize,
            part,
            parallel,
            kernel_scratch,
            shifts: Shifts { communicator, group, report, clock },
        };
        if !is_backward {
            let out = view_mut(operands.write(0), writes[0].extent);
            let lse = view_mut(operands.write(1), writes[1].extent);
            return ring.forward([q, k, v], (out, lse), (parts, sums));
        }
        let after_qkv =
            |index: usize| view(operands.read(inputs + index), reads[inputs + index].extent);
        let (out, lse, dout) = (after_qkv(0), after_qkv(1), after_qkv(2));
        let saved = AttentionSaved { q, k, v, out, lse, dout };
        let gradients: [Option<&mut [f32]>; 3] =
            std::array::from_fn(|index| (index < inputs).then(|| operands.write(index)));
        let [dq, dk, dv] = columns.split_mut(&writes[..inputs], gradients);
        ring.backward(saved, AttentionGradients { dq, dk, dv }, (parts, sums))
    })
}

/// The ring as one of its devices sees it.
struct Ring<'a> {
    /// Sizes of the device's queries.
    shape: AttentionShape,
    place: usize,
    places: usize,
    /// Elements of a part.
    part: usize,
    parallel: Parallel,
    kernel_scratch: &'a mut [f32],
    shifts: Shifts<'a>,
}

/// The shifts of a ring, counted and timed.
struct Shifts<'a> {
    communicator: &'a dyn Communicator,
    group: DeviceGroup,
    report: &'a mut DeviceReport,
    clock: &'a mut DeviceClock,
}

/// The attention of one sequence in a step: all of its queries and keys, or one chunk of two.
struct StepRows {
    queries: Range<usize>,
    keys: Range<usize>,
    /// Position of the first query, counted from the first key.
    first_query: usize,
}

impl Shifts<'_> {
    /// Sends the first slice of each pair to the next device, and receives that of the device before to the second.
    fn run<const N: usize>(
        &mut self,
        pairs: [Option<(&[f32], &mut [f32])>; N],
    ) -> Result<(), StopReason> {
        self.clock.read(TimeCategory::Attention);
        let mut elements = 0;
        for (source, target) in pairs.into_iter().flatten() {
            self.communicator.shift(source, target)?;
            elements += source.len() as u64;
        }
        self.clock.read(TimeCategory::CollectiveExposed);
        if elements > 0 {
            let payload = Bytes(4 * elements * self.group.size);
            let collective = Collective { kind: CollectiveKind::Shift, payload, group: self.group };
            self.report.count_collective(self.group.axis, &collective);
        }
        Ok(())
    }
}

impl Ring<'_> {
    /// Rows of each sequence whose scores the mask leaves in a step.
    fn step_rows(&self, step: usize) -> StepRows {
        let [step, place, places, tokens] =
            [step, self.place, self.places, self.shape.queries.count].map(|size| size as u64);
        let RingStepRows { queries, keys, first_query } =
            RingStepRows::new(step, (place, places), tokens);
        StepRows {
            queries: queries.start as usize..queries.end as usize,
            keys: 0..keys as usize,
            first_query: first_query as usize,
        }
    }

    /// The shape of one sequence in a step.
    fn step_shape(&self, rows: &StepRows) -> AttentionShape {
        AttentionShape {
            sequences: 1,
            length: rows.keys.len(),
            queries: PositionRuns::consecutive(rows.first_query, rows.queries.len()),
            window: usize::MAX,
            ..self.shape
        }
    }

    fn forward(
        &mut self,
        [q, k, v]: [MatrixView<'_>; 3],
        (mut out, mut lse): (MatrixViewMut<'_>, MatrixViewMut<'_>),
        (parts, step_lse): (&mut [f32], &mut [f32]),
    ) -> Result<(), StopReason> {
        let (keys, step_out) = parts.split_at_mut(2 * self.part);
        let (mut current, mut arriving) = keys.split_at_mut(self.part);
        pack(k, v, current);
        for step in 0..self.places {
            let shift = (step + 1 < self.places).then_some((&*current, &mut *arriving));
            self.shifts.run([shift])?;
            let rows = self.step_rows(step);
            let shape = self.step_shape(&rows);
            let (k, v) = unpacked(current, k.rows());
            for sequence in 0..self.shape.sequences {
                let [queries, keys] = self.of_sequence(sequence, &rows);
                let [k, v] = [k, v].map(|view| select(view, &keys));
                let inputs = (select(q, &queries), k, v);
                let out = select_mut(out.reborrow(), &queries);
                let lse = select_mut(lse.reborrow(), &queries);
                let parallel = self.parallel;
                if step == 0 {
                    attention_forward(shape, inputs, (out, lse), self.kernel_scratch, parallel);
                    continue;
                }
                let (count, width, heads) = (queries.len(), out.columns(), lse.columns());
                let step_out = &mut step_out[..count * width];
                let step_lse = &mut step_lse[..count * heads];
                let of_step = (
                    MatrixViewMut::new(step_out, count, width),
                    MatrixViewMut::new(step_lse, count, heads),
                );
                attention_forward(shape, inputs, of_step, self.kernel_scratch, parallel);
                let of_step = (
                    MatrixView::new(step_out, count, width),
                    MatrixView::new(step_lse, count, heads),
                );
                merge_outputs((out, lse), of_step);
            }
            std::mem::swap(&mut current, &mut arriving);
        }
        Ok(())
    }

    fn backward(
        &mut self,
        saved: AttentionSaved<'_>,
        AttentionGradients { mut dq, dk, dv }: AttentionGradients<'_>,
        (parts, sums): (&mut [f32], &mut [f32]),
    ) -> Result<(), StopReason> {
        let (keys, results) = parts.split_at_mut(2 * self.part);
        let (mut current, mut arriving) = keys.split_at_mut(self.part);
        pack(saved.k, saved.v, current);
        let (step_dq, contributions) = results.split_at_mut(dq.rows() * dq.columns());
        let (mut summed, mut arriving_sums) = sums.split_at_mut(self.part);
        let key_rows = saved.k.rows();
        for step in 0..self.places {
            let keys = (step + 1 < self.places).then_some((&*current, &mut *arriving));
            let gradients = (step > 0).then_some((&*summed, &mut *arriving_sums));
            self.shifts.run([keys, gradients])?;
            if step > 0 {
                std::mem::swap(&mut summed, &mut arriving_sums);
            }
            let rows = self.step_rows(step);
            let shape = self.step_shape(&rows);
            let (k, v) = unpacked(current, key_rows);
            for sequence in 0..self.shape.sequences {
                let [queries, keys] = self.of_sequence(sequence, &rows);
                let [q, out, lse, dout] =
                    [saved.q, saved.out, saved.lse, saved.dout].map(|view| select(view, &queries));
                let [k, v] = [k, v].map(|view| select(view, &keys));
                let saved = AttentionSaved { q, k, v, out, lse, dout };
                let mut dq = select_mut(dq.reborrow(), &queries);
                let (columns, parallel) = (dq.columns(), self.parallel);
                if step == 0 {
                    let (dk, dv) = unpacked_mut(summed, key_rows);
                    let [dk, dv] = [dk, dv].map(|view| select_mut(view, &keys));
                    let gradients = AttentionGradients { dq, dk, dv };
                    attention_backward(shape, saved, gradients, self.kernel_scratch, parallel);
                    continue;
                }
                let step_dq = &mut step_dq[..queries.len() * columns];
                let (dk, dv) = unpacked_mut(contributions, key_rows);
                let [dk, dv] = [dk, dv].map(|view| select_mut(view, &keys));
                let of_step = MatrixViewMut::new(step_dq, queries.len(), columns);
                let gradients = AttentionGradients { dq: of_step, dk, dv };
                attention_backward(shape, saved, gradients, self.kernel_scratch, parallel);
                add_rows(&mut dq, MatrixView::new(step_dq, queries.len(), columns));
                let width = self.part / key_rows;
                let contributions = MatrixView::new(contributions, key_rows, width);
                let summed = MatrixViewMut::new(summed, key_rows, width);
                add_rows(&mut select_mut(summed, &keys), select(contributions, &keys));
            }
            std::mem::swap(&mut current, &mut arriving);
        }
        self.shifts.run([Some((&*summed, &mut *arriving_sums))])?;
        let (of_keys, of_values) = unpacked(arriving_sums, key_rows);
        for (mut gradient, arrived) in [(dk, of_keys), (dv, of_values)] {
            (0..key_rows).for_each(|row| gradient.row_mut(row).copy_from_slice(arrived.row(row)));
        }
        Ok(())
    }

    /// Rows of the queries and of the keys of a sequence.
    fn of_sequence(&self, sequence: usize, rows: &StepRows) -> [Range<usize>; 2] {
        let first = sequence * self.shape.queries.count;
        [&rows.queries, &rows.keys].map(|rows| first + rows.start..first + rows.end)
    }
}

/// Copies keys and values side by side.
fn pack(k: MatrixView<'_>, v: MatrixView<'_>, part: &mut [f32]) {
    let width = k.columns();
    for (row, packed) in part.chunks_exact_mut(2 * width).enumerate() {
        packed[..width].copy_from_slice(k.row(row));
        packed[width..].copy_from_slice(v.row(row));
    }
}

/// Keys and values of a part.
fn unpacked(part: &[f32], rows: usize) -> (MatrixView<'_>, MatrixView<'_>) {
    let columns = part.len() / rows;
    let view = MatrixView::new(part, rows, columns);
    (view.column_range(0, columns / 2), view.column_range(columns / 2, columns / 2))
}

/// Gradients of keys and values in a part.
fn unpacked_mut(part: &mut [f32], rows: usize) -> (MatrixViewMut<'_>, MatrixViewMut<'_>) {
    let columns = part.len() / rows;
    MatrixViewMut::new(part, rows, columns).split_columns(columns / 2)
}

fn select<'a>(view: MatrixView<'a>, rows: &Range<usize>) -> MatrixView<'a> {
    view.row_range(rows.start, rows.len())
}

fn select_mut<'a>(view: MatrixViewMut<'a>, rows: &Range<usize>) -> MatrixViewMut<'a> {
    view.row_range(rows.start, rows.len())
}

fn add_rows(sum: &mut MatrixViewMut<'_>, summand: MatrixView<'_>) {
    for row in 0..summand.rows() {
        sum.row_mut(row).iter_mut().zip(summand.row(row)).for_each(|(sum, x)| *sum += x);
    }
}
