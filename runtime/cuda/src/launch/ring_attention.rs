//! Ring attention: the launches and shifts of the steps of [`narrows_plan::ring`].
//!
//! Scratch memory of the instruction is two operands of the arena, as [`narrows_plan::ring::RingScratch`] describes them. A
//! part is the keys and values of a device, or their gradients, side by side: `[rows, 2·kv_heads·w]`. Statistics of the
//! backward pass are in the scratch memory of the launches.
//!
//! The output of the first step goes to the output of the instruction. Each further step is merged: the first from there
//! to the fp32 sums, the last from the sums to the output. Of the two chunks of queries, the earlier one has its last step
//! where its device receives the keys of the first device. Gradients of queries are summed alike.

use std::ops::Range;

use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::ring::{RING_SCRATCH_OPERANDS, RingStepRows};
use narrows_plan::{Axis, DType, DeviceGroup};
use narrows_runtime::session::PositionRuns;

use super::attention::{
    BackwardOperands, ForwardOperands, HeadOperands, backward_operands, check_sizes,
    expect_common_stride, forward_operands,
};
use super::attention_kernels::{AttentionKernels, GradientHeads, QueryRun, statistics_operand};
use super::operand::{LaunchResult, MatrixOperand, MemorySpace, expect_dtype};
use super::ring_sums::{SequenceRows, add, copy, merge, round, zeros};
use super::site::{InstrSite, Launch};

/// Ring attention on one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RingAttention {
    /// Steps in their order.
    pub steps: Vec<RingStep>,
    /// Size of the scratch memory that all launches share, in bytes.
    pub scratch_bytes: u64,
}

/// A step of ring attention: each part begins when the one before has ended, but `beside` runs beside the shift.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RingStep {
    /// Launches before the shift.
    pub before: Vec<Launch>,
    /// The shift.
    pub shift: Option<RingShift>,
    /// Launches that access nothing of the shift, except that both may read.
    pub beside: Vec<Launch>,
    /// Launches after the shift.
    pub after: Vec<Launch>,
}

/// A shift: each member of a group sends to the next one and receives from the one before.
#[derive(Clone, Debug, PartialEq)]
pub struct RingShift {
    /// The group.
    pub group: DeviceGroup,
    /// Bytes of the arena that are sent, each with those that what arrives is written to.
    pub operands: Vec<(Range<u64>, Range<u64>)>,
}

impl RingShift {
    /// Bytes that all members send together.
    pub fn payload_bytes(&self) -> u64 {
        let sent: u64 = self.operands.iter().map(|(source, _)| source.end - source.start).sum();
        sent * self.group.size
    }
}

pub(super) fn ring_attention(
    site: &InstrSite<'_, &Attention>,
    group: DeviceGroup,
) -> LaunchResult<RingAttention> {
    check_sizes(site.op)?;
    let (op, device) = (site.op, site.device);
    let place = device.coordinates.position(Axis::Context, &device.context.mesh);
    let ring = Ring { op, group, place, tokens: op.queries() };
    match op.direction {
        Direction::Forward => ring.forward(site),
        Direction::Backward => ring.backward(site),
    }
}

/// The ring as one of its devices sees it.
struct Ring<'a> {
    op: &'a Attention,
    group: DeviceGroup,
    place: u64,
    /// Positions of a device in each sequence: two chunks.
    tokens: u64,
}

/// Matrices one after the other in an operand of the arena.
struct Carver {
    operand: MatrixOperand,
    /// Bytes that have been given.
    taken: u64,
}

impl Carver {
    fn new(operand: MatrixOperand) -> Carver {
        Carver { operand, taken: 0 }
    }

    fn matrix(&mut self, rows: u64, columns: u64) -> LaunchResult<MatrixOperand> {
        let MatrixOperand { begin, dtype, .. } = self.operand;
        let at = begin + self.taken;
        self.taken += dtype.bytes(rows * columns).0;
        if self.taken > dtype.bytes(self.operand.elements()).0 {
            return Err("its scratch memory is too small".into());
        }
        Ok(MatrixOperand::contiguous(MemorySpace::Arena, at, (rows, columns), dtype))
    }
}

impl Ring<'_> {
    fn rows(&self) -> u64 {
        self.op.sequences * self.tokens
    }

    fn outputs(&self) -> u64 {
        self.op.heads * self.op.head_dim
    }

    /// Rows whose scores the mask leaves in a step.
    fn step_rows(&self, step: u64) -> RingStepRows {
        RingStepRows::new(step, (self.place, self.group.size), self.tokens)
    }

    /// The kernels of a step. Windows are wider than any distance.
    fn kernels(&self, operands: &[&MatrixOperand]) -> LaunchResult<AttentionKernels<'_>> {
        AttentionKernels::select(self.op, 2 * self.tokens, operands)
    }

    fn query_run(&self, rows: &RingStepRows) -> QueryRun {
        let queries = rows.queries.end - rows.queries.start;
        let positions = rows.first_query..rows.first_query + queries;
        QueryRun { keys: rows.keys, positions, first_row: rows.queries.start }
    }

    /// These rows of each sequence.
    fn of_sequences(&self, rows: Range<u64>) -> SequenceRows {
        SequenceRows { rows, sequences: self.op.sequences, stride: self.tokens }
    }

    /// Rows that a step merges, each with whether it is merged for the last time.
    fn merged_rows(&self, step: u64) -> Vec<(SequenceRows, bool)> {
        let (tokens, chunk) = (self.tokens, self.tokens / 2);
        let queries = self.step_rows(step).queries;
        // Steps in which the chunks of queries have their last keys.
        let last_steps = [self.place, self.group.size - 1];
        let [earlier, later] = last_steps.map(|last| last == step);
        if queries.start == 0 && earlier == later {
            return vec![(self.of_sequences(0..tokens), later)];
        }
        let chunks = [(0..chunk, earlier), (chunk..tokens, later)];
        let merged = chunks.into_iter().filter(|(rows, _)| rows.start >= queries.start);
        merged.map(|(rows, is_last)| (self.of_sequences(rows), is_last)).collect()
    }

    /// The merges of a step that follows the first: of each, its rows, and the matrices from which it reads sums and results of the
    /// step, and to which it writes. Sums are in the result itself before the first merge and after the last one.
    fn merges(
        &self,
        step: u64,
        [result, sums, of_step]: [MatrixOperand; 3],
    ) -> impl Iterator<Item = (SequenceRows, [MatrixOperand; 3])> {
        self.merged_rows(step).into_iter().map(move |(rows, is_last)| {
            let from = if step == 1 { result } else { sums };
            let to = if is_last { result } else { sums };
            (rows, [from, of_step, to])
        })
    }

    fn shift(&self, pairs: &[[MatrixOperand; 2]]) -> RingShift {
        let bytes = |operand: &MatrixOperand| {
            operand.begin..operand.begin + operand.dtype.bytes(operand.elements()).0
        };
        let operands = pairs.iter().map(|[source, target]| (bytes(source), bytes(target)));
        RingShift { group: self.group, operands: operands.collect() }
    }

    fn forward(&self, site: &InstrSite<'_, &Attention>) -> LaunchResult<RingAttention> {
        let op = self.op;
        let ForwardOperands { heads: HeadOperands { q, k, v, .. }, out, lse } =
            forward_operands(site)?;
        let (mut parts, mut sums) = (Carver::new(site.output(2)?), Carver::new(site.output(3)?));
        expect_dtype(op.input, &[&parts.operand])?;
        expect_dtype(DType::F32, &[&sums.operand])?;
        let rows = self.rows();
        if rows == 0 {
            return Ok(RingAttention::default());
        }
        let mut part = || parts.matrix(rows, op.key_columns());
        let (mut current, mut arriving) = (part()?, part()?);
        let step_out = parts.matrix(rows, self.outputs())?;
        let summed = match op.input {
            DType::F32 => out,
            _ => sums.matrix(rows, self.outputs())?,
        };
        let step_lse = sums.matrix(rows, op.heads)?;
        let [part_k, part_v] = halves(&current)?;
        let kernels = self.kernels(&[&q, &part_k, &part_v, &out, &step_out])?;
        let mut steps = vec![];
        for step in 0..self.group.size {
            let is_last = step + 1 == self.group.size;
            let mut ring_step = RingStep::default();
            if step == 0 {
                ring_step.before = pack([&k, &v], &current)?;
            }
            ring_step.shift = (!is_last).then(|| self.shift(&[[current, arriving]]));
            let step_rows = self.step_rows(step);
            let [part_k, part_v] = halves(&current)?;
            let results = if step == 0 { [&out, &lse] } else { [&step_out, &step_lse] };
            let operands = [&q, &part_k, &part_v, results[0], results[1]];
            ring_step.beside.push(kernels.forward(operands, &self.query_run(&step_rows))?);
            if step > 0 {
                for (rows, merged) in self.merges(step, [out, summed, step_out]) {
                    ring_step.beside.push(merge(op, &rows, merged, [lse, step_lse])?);
                }
            }
            steps.push(ring_step);
            std::mem::swap(&mut current, &mut arriving);
        }
        Ok(RingAttention { steps, scratch_bytes: 0 })
    }

    fn backward(&self, site: &InstrSite<'_, &Attention>) -> LaunchResult<RingAttention> {
        let op = self.op;
        let BackwardOperands { read, written, out, lse, out_gradient: dout } =
            backward_operands(site)?;
        let HeadOperands { q, k, v, .. } = read;
        let gradients = site.scheduled.instr.writes.len().saturating_sub(RING_SCRATCH_OPERANDS);
        let mut parts = Carver::new(site.output(gradients)?);
        let mut sums = Carver::new(site.output(gradients + 1)?);
        expect_dtype(op.input, &[&parts.operand])?;
        expect_dtype(DType::F32, &[&sums.operand])?;
        expect_common_stride([&out, &dout])?;
        let (rows, is_f32) = (self.rows(), op.input == DType::F32);
        if rows == 0 {
            return Ok(RingAttention::default());
        }
        let mut part = || parts.matrix(rows, op.key_columns());
        let (mut current, mut arriving) = (part()?, part()?);
        let step_dq = parts.matrix(rows, self.outputs())?;
        let contributions = parts.matrix(rows, op.key_columns())?;
        let summed_dq = if is_f32 { written.q } else { sums.matrix(rows, self.outputs())? };
        let mut part = || sums.matrix(rows, op.key_columns());
        let (mut summed, mut arriving_sums) = (part()?, part()?);
        let statistics = statistics_operand(op);
        let [part_k, part_v] = halves(&current)?;
        let operands = [&q, &part_k, &part_v, &out, &dout, &written.q, &step_dq, &contributions];
        let kernels = self.kernels(&operands)?;
        let mut steps = vec![];
        for step in 0..self.group.size {
            let is_last = step + 1 == self.group.size;
            let mut ring_step = RingStep::default();
            let mut shifted = vec![];
            if step == 0 {
                ring_step.before = pack([&k, &v], &current)?;
                ring_step.beside.push(kernels.statistics([&out, &dout, &lse, &statistics])?);
            }
            if !is_last {
                shifted.push([current, arriving]);
            }
            if step > 0 {
                shifted.push([summed, arriving_sums]);
                std::mem::swap(&mut summed, &mut arriving_sums);
            }
            ring_step.shift = Some(self.shift(&shifted));
            let step_rows = self.step_rows(step);
            let (step_dq, contributions) = match step {
                0 => (written.q, if is_f32 { summed } else { contributions }),
                _ => (step_dq, contributions),
            };
            let [[k, v], [dk, dv]] = [halves(&current)?, halves(&contributions)?];
            let run = self.query_run(&step_rows);
            let inputs = [&q, &k, &v, &dout, &statistics];
            ring_step.beside.push(kernels.query_gradients(inputs, &step_dq, &run)?);
            // The kernels for gradients of keys begin with the first row.
            let first = step_rows.queries.start;
            let [q, dout, statistics] =
                [q, dout, statistics].map(|all| all.row_range(first, all.rows - first));
            let inputs = [&q, &k, &v, &dout, &statistics];
            let positions = run.positions.start as usize..run.positions.end as usize;
            let of_keys =
                (step_rows.keys, PositionRuns::consecutive(positions.start, positions.len()));
            let heads = GradientHeads { first_used: 0, count: op.kv_heads };
            ring_step.beside.push(kernels.key_gradients(inputs, [&dk, &dv], of_keys, heads)?);
            match step {
                0 if is_f32 => {}
                0 => ring_step.beside.push(copy(&contributions, &summed)?),
                _ => {
                    for (rows, merged) in self.merges(step, [written.q, summed_dq, step_dq]) {
                        ring_step.beside.push(add(&rows, merged)?);
                    }
                    let rows = self.of_sequences(0..step_rows.keys);
                    ring_step.after.push(add(&rows, [summed, contributions, summed])?);
                }
            }
            steps.push(ring_step);
            std::mem::swap(&mut current, &mut arriving);
        }
        let shift = self.shift(&[[summed, arriving_sums]]);
        let after = self.final_gradients(&arriving_sums, &written, read.first_kv_head)?;
        steps.push(RingStep { shift: Some(shift), after, ..RingStep::default() });
        Ok(RingAttention { steps, scratch_bytes: 4 * statistics.elements() })
    }

    /// Launches that write the gradients of keys and values from those that have come home, and zeros for KV heads that
    /// this device does not use.
    fn final_gradients(
        &self,
        arrived: &MatrixOperand,
        written: &HeadOperands,
        first_kv_head: u64,
    ) -> LaunchResult<Vec<Launch>> {
        let [dk, dv] = halves(arrived)?;
        let first = first_kv_head * self.op.head_dim;
        let mut launches = vec![];
        for (gradient, target) in [(dk, written.all_k), (dv, written.all_v)] {
            let end = first + gradient.columns;
            let of_target = |columns: Range<u64>| {
                target.column_range(columns.start, columns.end - columns.start)
            };
            launches.push(round(&gradient, &of_target(first..end)?)?);
            for unused in [0..first, end..target.columns] {
                if !unused.is_empty() {
                    launches.push(zeros(&of_target(unused)?)?);
                }
            }
        }
        Ok(launches)
    }
}

/// Launches that copy keys and values to a part.
fn pack([k, v]: [&MatrixOperand; 2], part: &MatrixOperand) -> LaunchResult<Vec<Launch>> {
    let [part_k, part_v] = halves(part)?;
    Ok(vec![copy(k, &part_k)?, copy(v, &part_v)?])
}

/// Keys and values of a part.
fn halves(part: &MatrixOperand) -> LaunchResult<[MatrixOperand; 2]> {
    let half = part.columns / 2;
    Ok([part.column_range(0, half)?, part.column_range(half, half)?])
}
