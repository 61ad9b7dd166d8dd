//! Parameters, their gradients and moments, in and out of the arenas as whole tensors.
//!
//! In mixed precision a weight is its fp32 master copy: that is read, and what is written goes to both
//! it and the bf16 copy that the products see.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use narrows_plan::model::Model;
use narrows_plan::program::{Buffer, Program, Region, StageProgram};
use narrows_plan::strategy::Zero;
use rayon::prelude::*;

use super::sharded_parameter::ShardedParameter;
use super::{MeshCoordinates, Session};
use crate::error::RunError;
use crate::parameters::{LogicalParameter, logical_parameters};
use crate::report::DeviceId;

/// Numbers that a thread sets at a time.
const PIECE: usize = 1 << 14;

/// Whole tensors by the logical name of their parameter, row-major.
pub type NamedTensors = BTreeMap<String, Vec<f32>>;

impl Session {
    /// Sets every weight to its initial value, in a run with this seed. It depends on the model
    /// alone: every plan begins alike.
    ///
    /// # Errors
    /// When a device is lost.
    pub fn initialise(&mut self, model: &Model, seed: u64) -> Result<(), RunError> {
        let parameters = logical_parameters(model);
        let parameters: HashMap<&str, &LogicalParameter> =
            parameters.iter().map(|parameter| (parameter.name.as_str(), parameter)).collect();
        self.set(TensorKind::Weights, |name| {
            let parameter = parameters.get(name)?;
            let (value, columns) = (parameter.initial(seed), parameter.columns);
            Some(move |first: u64, numbers: &mut [f32]| {
                for (number, element) in numbers.iter_mut().zip(first..) {
                    *number = value(element / columns, element % columns) as f32;
                }
            })
        })
    }

    /// Sets tensors, by logical name, from whole ones; names that are not there stay as they are.
    ///
    /// # Errors
    /// When a device is lost.
    ///
    /// # Panics
    /// When a tensor has fewer elements than its parameter.
    pub fn load_tensors(
        &mut self,
        tensors: TensorKind,
        whole: &NamedTensors,
    ) -> Result<(), RunError> {
        self.set(tensors, |name| {
            whole.get(name).map(|whole| {
                |first: u64, numbers: &mut [f32]| {
                    numbers.copy_from_slice(&whole[first as usize..][..numbers.len()]);
                }
            })
        })
    }

    /// Elements of every logical parameter.
    pub(crate) fn parameter_elements(&self) -> &BTreeMap<String, usize> {
        self.subject.sizes()
    }

    /// Goes on as if so many optimizer steps had been made.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Sets what is held of some parameters: what `values` gives is called with the first element of
    /// a run and the run's numbers, on many threads.
    fn set<F>(
        &mut self,
        tensors: TensorKind,
        values: impl Fn(&str) -> Option<F>,
    ) -> Result<(), RunError>
    where
        F: Fn(u64, &mut [f32]) + Sync,
    {
        let program = self.subject.program();
        let mesh = program.context.mesh;
        for device in self.engine.devices() {
            let at = MeshCoordinates::of_device(device, &mesh);
            for buffer in tensors.buffers(&program.stages[at.stage as usize]) {
                let Some(held) =
                    ShardedParameter::new(buffer, at.tensor, mesh.tensor, program.tied)
                else {
                    continue;
                };
                let known: Vec<(String, F)> = held
                    .parameter_names()
                    .filter_map(|name| values(&name).map(|value| (name, value)))
                    .collect();
                if known.is_empty() {
                    continue;
                }
                let window = ReplicaWindow::of(buffer, program, at.data);
                self.engine.modify_buffer(device, buffer, &mut |numbers| {
                    let mut runs = vec![];
                    held.for_each_run(|name, elements, number| {
                        let known = known.iter().find(|(known, _)| known == name);
                        if let (Some((_, fill)), Some((first, at))) =
                            (known, window.place(elements, number))
                        {
                            runs.push((fill, first.start, at));
                        }
                    });
                    let pieces = pieces(runs, numbers);
                    pieces.into_par_iter().for_each(|(fill, first, piece)| fill(first, piece));
                })?;
            }
        }
        Ok(())
    }

    /// Whole tensors, by logical name, as far as the devices of this process hold them. Gradients are
    /// those that [`gradients_only`](Session::gradients_only) left.
    ///
    /// # Errors
    /// When a device is lost.
    pub fn local_tensors(&self, tensors: TensorKind) -> Result<NamedTensors, RunError> {
        let mut made: NamedTensors = BTreeMap::new();
        for device in self.devices() {
            let numbers = |buffer: &Buffer| self.engine.read_buffer(device, buffer);
            self.place(&mut made, tensors, device, numbers)?;
        }
        Ok(made)
    }

    /// The same from the devices of all processes: they come together in process 0, others get none.
    ///
    /// # Errors
    /// When a device is lost, or a process is gone or late.
    pub fn gather_tensors(&self, tensors: TensorKind) -> Result<NamedTensors, RunError> {
        let Some(cluster) = self.cluster() else { return self.local_tensors(tensors) };
        let program = self.program();
        let mesh = program.context.mesh;
        let buffers =
            |device| tensors.master_buffers(&program.stages[DeviceId(device).stage(&mesh)]);
        let own = self.devices().flat_map(|device| buffers(device).map(move |b| (device, b)));
        let own: Vec<Cow<'_, [f32]>> = own
            .map(|(device, buffer)| self.engine.read_buffer(device, buffer))
            .collect::<Result<_, _>>()?;
        let own: Vec<&[f32]> = own.iter().map(|numbers| &**numbers).collect();
        let mut made: NamedTensors = BTreeMap::new();
        let count = |device| buffers(device).map(count_of).sum();
        cluster.gather(&own, &count, &mut |device, numbers| {
            // They came in the order in which they are placed.
            let mut rest = numbers;
            let placed = self.place(&mut made, tensors, device, |buffer| {
                let (these, others) = rest.split_at(count_of(buffer));
                rest = others;
                Ok(these.into())
            });
            debug_assert!(placed.is_ok(), "what came is read from no device");
        })?;
        Ok(made)
    }

    /// Puts what a device holds where it belongs; `numbers` gives those of every buffer in turn.
    fn place<'a>(
        &self,
        made: &mut NamedTensors,
        tensors: TensorKind,
        device: u64,
        mut numbers: impl FnMut(&Buffer) -> Result<Cow<'a, [f32]>, RunError>,
    ) -> Result<(), RunError> {
        let program = self.program();
        let mesh = program.context.mesh;
        let at = MeshCoordinates::of_device(device, &mesh);
        for buffer in tensors.master_buffers(&program.stages[at.stage as usize]) {
            let numbers = numbers(buffer)?;
            let window = ReplicaWindow::of(buffer, program, at.data);
            let Some(held) = ShardedParameter::new(buffer, at.tensor, mesh.tensor, program.tied)
            else {
                continue;
            };
            let again = (held.is_replicated() && at.tensor > 0) || (window.is_all() && at.data > 0);
            if again {
                continue;
            }
            held.for_each_run(|name, elements, number| {
                let Some((elements, at)) = window.place(elements, number) else { return };
                if !made.contains_key(name) {
                    let size = self.parameter_elements().get(name).copied().unwrap_or(0);
                    made.insert(name.to_string(), vec![0.0; size]);
                }
                let elements = elements.start as usize..elements.end as usize;
                let target = made.get_mut(name).and_then(|whole| whole.get_mut(elements));
                if let Some(target) = target {
                    target.copy_from_slice(&numbers[at]);
                }
            });
        }
        Ok(())
    }
}

/// The numbers of each run, which overlap nowhere, in pieces that threads share: a piece with its run's mark,
/// and its first element.
fn pieces<F>(
    mut runs: Vec<(F, u64, Range<usize>)>,
    mut numbers: &mut [f32],
) -> Vec<(F, u64, &mut [f32])>
where
    F: Copy,
{
    runs.sort_by_key(|(.., at)| at.start);
    let (mut pieces, mut before) = (Vec::with_capacity(runs.len()), 0);
    for (mark, first, at) in runs {
        let (run, rest) = numbers.split_at_mut(at.start - before).1.split_at_mut(at.len());
        (numbers, before) = (rest, at.end);
        let run = run.chunks_mut(PIECE).enumerate();
        pieces.extend(run.map(|(index, piece)| (mark, first + (index * PIECE) as u64, piece)));
    }
    pieces
}

/// Which of a parameter's tensors.
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
    /// The buffers that hold them.
    pub fn master_buffers<'a>(
        self,
        stage: &'a StageProgram,
    ) -> impl Iterator<Item = &'a Buffer> + use<'a> {
        let mixed = stage.buffers.iter().any(TensorKind::is_master);
        self.buffers(stage).filter(move |buffer| {
            self != TensorKind::Weights || !mixed || TensorKind::is_master(buffer)
        })
    }

    /// The buffers that they are in, copies in another format included.
    fn buffers<'a>(self, stage: &'a StageProgram) -> impl Iterator<Item = &'a Buffer> + use<'a> {
        let (region, kind) = match self {
            TensorKind::Weights => (Region::Weight, "weight"),
            TensorKind::Gradients => (Region::Gradient, "gradient"),
            TensorKind::FirstMoments => (Region::Optimizer, "first moment"),
            TensorKind::SecondMoments => (Region::Optimizer, "second moment"),
        };
        stage.buffers.iter().filter(move |buffer| {
            (buffer.region == region && buffer.name.ends_with(kind))
                || (self == TensorKind::Weights && TensorKind::is_master(buffer))
        })
    }

    fn is_master(buffer: &Buffer) -> bool {
        buffer.region == Region::Optimizer && buffer.name.ends_with("master")
    }
}

/// Numbers of a buffer.
fn count_of(buffer: &Buffer) -> usize {
    (buffer.extent.rows * buffer.extent.columns) as usize
}

/// The numbers of a shard that one replica has, and where: with ZeRO-1 each has its own part of
/// moments and master copies, and of the summed gradients.
struct ReplicaWindow {
    /// Which part of the shard, and how many numbers it has.
    part: Option<(u64, u64)>,
    /// Whether the buffer holds the part alone.
    alone: bool,
}

impl ReplicaWindow {
    fn of(buffer: &Buffer, program: &Program, replica: u64) -> ReplicaWindow {
        let replicas = program.context.mesh.data;
        let alone = buffer.region == Region::Optimizer;
        let parted = program.context.zero == Zero::One && buffer.region != Region::Weight;
        let numbers = buffer.extent.rows * buffer.extent.columns;
        let each = if alone { numbers } else { numbers / replicas };
        ReplicaWindow { part: parted.then_some((replica, each)), alone }
    }

    fn is_all(&self) -> bool {
        self.part.is_none()
    }

    /// Which elements of a run this replica has, and where in the buffer; the run begins at a number
    /// of the shard.
    fn place(&self, elements: Range<u64>, number: u64) -> Option<(Range<u64>, Range<usize>)> {
        let Some((replica, each)) = self.part else {
            let at = number as usize;
            let length = (elements.end - elements.start) as usize;
            return Some((elements, at..at + length));
        };
        let mine = replica * each..(replica + 1) * each;
        let begin = number.max(mine.start);
        let end = (number + elements.end - elements.start).min(mine.end);
        if begin >= end {
            return None;
        }
        let first = elements.start + begin - number;
        let at = (if self.alone { begin - mine.start } else { begin }) as usize;
        let length = end - begin;
        Some((first..first + length, at..at + length as usize))
    }
}
