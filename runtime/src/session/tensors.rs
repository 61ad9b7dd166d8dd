//! Parameters, gradients and moments as whole tensors, into and out of the arenas.
//!
//! In mixed precision, reading a weight returns its fp32 master copy, and writing sets both the master
//! copy and the bf16 copy that GEMMs read.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use narrows_plan::model::ParameterId;
use narrows_plan::program::{Buffer, BufferId, BufferRole, Program, StageProgram};
use rayon::prelude::*;

use super::coordinates::MeshCoordinates;
use super::engine::Engine;
use super::model_program::ModelProgram;
use super::sharded_parameter::ShardedParameter;
use crate::error::RunError;
use crate::parameters::LogicalParameter;
use crate::process_group::ProcessGroup;
use crate::report::DeviceId;

/// Elements that one task of a thread pool sets.
const CHUNK_ELEMENTS: usize = 1 << 14;

/// Whole tensors of the parameters of a model, row-major.
pub type ModelTensors = BTreeMap<ParameterId, Vec<f32>>;

/// Number of elements after which values repeat: a prime, so that the rows of a matrix begin at different values.
const REPEATED_VALUES: u64 = (1 << 16) + 1;

/// As [`LogicalParameter::initial_fill`], but only the first elements are drawn and the others repeat them, which takes a hundredth of
/// the time.
pub(super) fn repeated_values(
    parameter: &LogicalParameter,
    seed: u64,
) -> impl Fn(u64, &mut [f32]) + Sync + use<> {
    let mut drawn = vec![0.0; parameter.elements().clamp(1, REPEATED_VALUES) as usize];
    parameter.initial_fill(seed)(0, &mut drawn);
    move |first: u64, target: &mut [f32]| {
        let begin = (first % drawn.len() as u64) as usize;
        let values = drawn[begin..].iter().chain(drawn.iter().cycle());
        target.iter_mut().zip(values).for_each(|(target, value)| *target = *value);
    }
}

/// Sets the shards of an engine's devices. `fill_of(id)` returns the function that fills a run of a
/// parameter's elements, given the index of the first element; it is called on many threads.
/// Parameters without such a function stay unchanged.
pub(super) fn set_tensors<F>(
    program: &Program,
    engine: &mut dyn Engine,
    kind: TensorKind,
    fill_of: impl Fn(ParameterId) -> Option<F>,
) -> Result<(), RunError>
where
    F: Fn(u64, &mut [f32]) + Sync,
{
    let mesh = program.context.mesh;
    for device in engine.devices() {
        let coordinates = MeshCoordinates::of_device(device, &mesh);
        for buffer in kind.buffers(&program.stages[coordinates.stage as usize]) {
            let Some(shards) =
                ShardedParameter::new(buffer, coordinates.tensor, mesh.tensor, program.tied)
            else {
                continue;
            };
            let fills: Vec<(ParameterId, F)> = shards
                .parameter_ids()
                .filter_map(|id| fill_of(id).map(|fill| (id, fill)))
                .collect();
            if fills.is_empty() {
                continue;
            }
            let window = ReplicaWindow::new(buffer, program, coordinates.replica);
            engine.modify_buffer(device, buffer, &mut |buffer_elements| {
                let mut runs = vec![];
                shards.for_each_run(|id, elements, offset| {
                    let fill = fills.iter().find(|(filled, _)| *filled == id);
                    if let (Some((_, fill)), Some((elements, range))) =
                        (fill, window.intersect(elements, offset))
                    {
                        runs.push((fill, elements.start, range));
                    }
                });
                let chunks = split_into_chunks(runs, buffer_elements);
                chunks.into_par_iter().for_each(|(fill, first, chunk)| fill(first, chunk));
            })?;
        }
    }
    Ok(())
}

/// Whole tensors with the shards of an engine's devices; other elements are zero.
pub(super) fn local_tensors(
    program: &ModelProgram,
    engine: &dyn Engine,
    kind: TensorKind,
) -> Result<ModelTensors, RunError> {
    local_tensors_of(program, engine, (kind, StateCopies::First), |_, _| true)
}

/// Devices that provide an element that several of them hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateCopies {
    /// The first of all.
    First,
    /// The first of each group that shares a copy of the states that ZeRO shards.
    Each,
}

/// As [`local_tensors`], of the buffers of stages that `includes` accepts, and of the first or of each copy of the optimizer states.
pub(super) fn local_tensors_of(
    program: &ModelProgram,
    engine: &dyn Engine,
    (kind, copies): (TensorKind, StateCopies),
    includes: impl Fn(usize, BufferId) -> bool,
) -> Result<ModelTensors, RunError> {
    let mut whole = ModelTensors::new();
    for device in engine.devices() {
        let stage = DeviceId(device).stage(&program.program().context.mesh);
        let buffers = kind.indexed_master_buffers(&program.program().stages[stage]);
        for (index, buffer) in buffers {
            if includes(stage, BufferId(index as u32)) {
                let elements = engine.read_buffer(device, buffer)?;
                copy_to_whole(&mut whole, (program, copies), device, buffer, &elements);
            }
        }
    }
    Ok(whole)
}

/// Whole tensors of all processes, gathered at rank 0; other ranks return none.
pub(super) fn gather_tensors(
    program: &ModelProgram,
    engine: &dyn Engine,
    group: &dyn ProcessGroup,
    kind: TensorKind,
) -> Result<ModelTensors, RunError> {
    let buffers_of = |device| kind.master_buffers(stage_of(program, device));
    let mut local: Vec<Cow<'_, [f32]>> = vec![];
    for device in engine.devices() {
        for buffer in buffers_of(device) {
            local.push(engine.read_buffer(device, buffer)?);
        }
    }
    let local: Vec<&[f32]> = local.iter().map(|elements| &**elements).collect();
    let mut whole = ModelTensors::new();
    let count = |device| buffers_of(device).map(element_count).sum();
    group.gather(&local, &count, &mut |device, elements| {
        let mut remaining = elements;
        for buffer in buffers_of(device) {
            let (elements, rest) = remaining.split_at(element_count(buffer));
            remaining = rest;
            copy_to_whole(&mut whole, (program, StateCopies::First), device, buffer, elements);
        }
    })?;
    Ok(whole)
}

pub(super) fn stage_of(program: &ModelProgram, device: u64) -> &StageProgram {
    let program = program.program();
    &program.stages[DeviceId(device).stage(&program.context.mesh)]
}

/// Copies the elements of a device's buffer to their places in whole tensors.
fn copy_to_whole(
    whole: &mut ModelTensors,
    (model_program, copies): (&ModelProgram, StateCopies),
    device: u64,
    buffer: &Buffer,
    buffer_elements: &[f32],
) {
    let program = model_program.program();
    let mesh = program.context.mesh;
    let coordinates = MeshCoordinates::of_device(device, &mesh);
    let window = ReplicaWindow::new(buffer, program, coordinates.replica);
    let Some(shards) = ShardedParameter::new(buffer, coordinates.tensor, mesh.tensor, program.tied)
    else {
        return;
    };
    let is_later_replica = match copies {
        StateCopies::First => window.is_duplicate,
        StateCopies::Each => window.is_duplicate_in_group,
    };
    let duplicate = (shards.is_replicated() && coordinates.tensor > 0) || is_later_replica;
    if duplicate {
        return;
    }
    shards.for_each_run(|id, elements, offset| {
        let Some((elements, range)) = window.intersect(elements, offset) else { return };
        let zeros = || vec![0.0; model_program.parameter_elements()[&id]];
        let tensor = whole.entry(id).or_insert_with(zeros);
        let elements = elements.start as usize..elements.end as usize;
        tensor[elements].copy_from_slice(&buffer_elements[range]);
    });
}

/// Splits disjoint runs of a buffer, given as (fill, first element, range), into chunks for threads:
/// (fill, first element of the chunk, chunk).
fn split_into_chunks<F: Copy>(
    mut runs: Vec<(F, u64, Range<usize>)>,
    mut buffer: &mut [f32],
) -> Vec<(F, u64, &mut [f32])> {
    runs.sort_by_key(|(.., range)| range.start);
    let (mut chunks, mut consumed) = (Vec::with_capacity(runs.len()), 0);
    for (fill, first, range) in runs {
        let (run, rest) = buffer.split_at_mut(range.start - consumed).1.split_at_mut(range.len());
        (buffer, consumed) = (rest, range.end);
        let run = run.chunks_mut(CHUNK_ELEMENTS).enumerate();
        chunks.extend(
            run.map(|(index, chunk)| (fill, first + (index * CHUNK_ELEMENTS) as u64, chunk)),
        );
    }
    chunks
}

/// Kind of a parameter's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// The weights.
    Weights,
    /// Their gradients.
    Gradients,
    /// AdamW's first moments.
    FirstMoments,
    /// AdamW's second moments.
    SecondMoments,
}

impl TensorKind {
    /// Buffers of a stage that hold the tensors in full precision: master copies, where weights have
    /// them.
    pub fn master_buffers<'a>(
        self,
        stage: &'a StageProgram,
    ) -> impl Iterator<Item = &'a Buffer> + use<'a> {
        self.indexed_master_buffers(stage).map(|(_, buffer)| buffer)
    }

    /// The [master buffers](TensorKind::master_buffers) of a stage with their indices.
    pub(super) fn indexed_master_buffers<'a>(
        self,
        stage: &'a StageProgram,
    ) -> impl Iterator<Item = (usize, &'a Buffer)> + use<'a> {
        let has_masters = stage.buffers.iter().any(TensorKind::is_master);
        stage.buffers.iter().enumerate().filter(move |(_, buffer)| {
            let is_master =
                self != TensorKind::Weights || !has_masters || TensorKind::is_master(buffer);
            is_master && self.is_in(buffer)
        })
    }

    /// Buffers of a stage that hold the tensors, including copies in another format.
    pub(super) fn buffers<'a>(
        self,
        stage: &'a StageProgram,
    ) -> impl Iterator<Item = &'a Buffer> + use<'a> {
        stage.buffers.iter().filter(move |buffer| self.is_in(buffer))
    }

    /// Whether a buffer holds tensors of this kind.
    fn is_in(self, buffer: &Buffer) -> bool {
        let role = match self {
            TensorKind::Weights => BufferRole::Weight,
            TensorKind::Gradients => BufferRole::WeightGradient,
            TensorKind::FirstMoments => BufferRole::FirstMoment,
            TensorKind::SecondMoments => BufferRole::SecondMoment,
        };
        buffer.role == role || (self == TensorKind::Weights && TensorKind::is_master(buffer))
    }

    fn is_master(buffer: &Buffer) -> bool {
        buffer.role == BufferRole::MasterWeight
    }
}

pub(super) fn element_count(buffer: &Buffer) -> usize {
    (buffer.extent.rows * buffer.extent.columns) as usize
}

/// The elements of a shard that belong to one replica: with ZeRO each replica has its own part of
/// moments and master copies, of the reduced gradients, and with ZeRO-3 of the weights of blocks.
pub(super) struct ReplicaWindow {
    /// Elements of the shard that belong to the replica; `None` for all.
    part: Option<Range<u64>>,
    /// Whether the buffer holds only that part.
    buffer_is_part: bool,
    /// Whether another replica before this one holds the same elements.
    is_duplicate: bool,
    /// Whether another replica before this one in its shard group does.
    is_duplicate_in_group: bool,
}

impl ReplicaWindow {
    pub fn new(buffer: &Buffer, program: &Program, replica: u64) -> ReplicaWindow {
        let context = &program.context;
        let position = context.shard_position(replica);
        let buffer_is_part = buffer.is_replica_part(context);
        let has_part =
            buffer_is_part || (context.shard_size > 1 && buffer.role != BufferRole::Weight);
        let parts = if buffer_is_part { 1 } else { context.shard_size };
        let size = element_count(buffer) as u64 / parts;
        let part = has_part.then_some(position * size..(position + 1) * size);
        let first = if part.is_some() { position } else { 0 };
        let is_duplicate_in_group = part.is_none() && position > 0;
        ReplicaWindow {
            part,
            buffer_is_part,
            is_duplicate: replica != first,
            is_duplicate_in_group,
        }
    }

    /// Whether the replica holds the whole shard.
    pub fn is_whole(&self) -> bool {
        self.part.is_none()
    }

    /// Whether the replica holds a part of the shard that a replica before it holds too.
    pub fn is_duplicate_part(&self) -> bool {
        self.part.is_some() && self.is_duplicate
    }

    /// The window of a part of a whole shard.
    pub fn of_part(part: Range<u64>) -> ReplicaWindow {
        ReplicaWindow {
            part: Some(part),
            buffer_is_part: false,
            is_duplicate: false,
            is_duplicate_in_group: false,
        }
    }

    /// The elements of a run that belong to the replica, and their range in the buffer. The run starts
    /// at `offset` in the shard.
    pub fn intersect(
        &self,
        elements: Range<u64>,
        offset: u64,
    ) -> Option<(Range<u64>, Range<usize>)> {
        let length = elements.end - elements.start;
        let Some(part) = &self.part else {
            return Some((elements, offset as usize..(offset + length) as usize));
        };
        let (start, end) = (offset.max(part.start), (offset + length).min(part.end));
        if start >= end {
            return None;
        }
        let first = elements.start + start - offset;
        let buffer_start = if self.buffer_is_part { start - part.start } else { start };
        let length = end - start;
        let range = buffer_start as usize..(buffer_start + length) as usize;
        Some((first..first + length, range))
    }
}
