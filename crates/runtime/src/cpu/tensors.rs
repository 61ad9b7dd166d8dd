//! Parameters, their gradients and moments, in and out of the arenas as whole tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use narrows_plan::model::Model;
use narrows_plan::program::{Buffer, Program, Region, StageProgram};
use narrows_plan::strategy::Zero;

use super::device::Coordinates;
use super::session::Session;
use super::weights::Held;
use crate::backend::RunError;
use crate::parameters::logical_parameters;

/// Whole tensors by the logical name of their parameter, row-major.
pub type Whole = BTreeMap<String, Vec<f32>>;

impl Session {
    /// Sets every weight to its initial value, in a run with this seed. It depends on the model
    /// alone: every plan begins alike.
    pub fn initialise(&mut self, model: &Model, seed: u64) {
        for parameter in logical_parameters(model) {
            let value = parameter.initial(seed);
            let columns = parameter.columns;
            self.set(Tensors::Weights, |name| {
                (name == parameter.name).then_some(|first: u64, numbers: &mut [f32]| {
                    for (number, element) in numbers.iter_mut().zip(first..) {
                        *number = value(element / columns, element % columns) as f32;
                    }
                })
            });
        }
    }

    /// Sets tensors, by logical name, from whole ones; names that are not there stay as they are.
    ///
    /// # Panics
    /// When a tensor has fewer elements than its parameter.
    pub fn load(&mut self, tensors: Tensors, whole: &Whole) {
        self.set(tensors, |name| {
            whole.get(name).map(|whole| {
                |first: u64, numbers: &mut [f32]| {
                    numbers.copy_from_slice(&whole[first as usize..][..numbers.len()]);
                }
            })
        });
    }

    /// Elements of every logical parameter.
    pub(crate) fn sizes(&self) -> &BTreeMap<String, usize> {
        &self.sizes
    }

    /// Goes on as if so many optimizer steps had been made.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Sets what is held of some parameters: what `values` gives is called with the first element of
    /// a run and the run's numbers.
    fn set<F>(&mut self, tensors: Tensors, values: impl Fn(&str) -> Option<F>)
    where
        F: Fn(u64, &mut [f32]),
    {
        let program = self.program.program();
        let mesh = program.context.mesh;
        for (device, arena) in self.devices.clone().zip(&mut self.arenas) {
            let at = Coordinates::of(device, &mesh);
            for buffer in tensors.of(&program.stages[at.stage as usize]) {
                let Some(held) = Held::new(buffer, at.tensor, mesh.tensor, program.tied) else {
                    continue;
                };
                let known: Vec<(String, F)> = held
                    .names()
                    .filter_map(|name| values(&name).map(|value| (name, value)))
                    .collect();
                if known.is_empty() {
                    continue;
                }
                let window = Window::of(tensors, buffer, program, at.data);
                let numbers = arena.slice_mut(numbers_of(buffer));
                held.each(|name, elements, number| {
                    let known = known.iter().find(|(known, _)| known == name);
                    if let (Some((_, fill)), Some((first, at))) =
                        (known, window.place(elements, number))
                    {
                        fill(first.start, &mut numbers[at]);
                    }
                });
            }
        }
    }

    /// Whole tensors, by logical name, as far as the devices of this process hold them. Gradients are
    /// those that [`gradients_only`](Session::gradients_only) left.
    pub fn gather(&self, tensors: Tensors) -> Whole {
        let mut made: Whole = BTreeMap::new();
        for (device, arena) in self.devices().zip(&self.arenas) {
            self.place(&mut made, tensors, device, |buffer| arena.slice(numbers_of(buffer)));
        }
        made
    }

    /// The same from the devices of all processes: they come together in process 0, others get none.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn gather_all(&self, tensors: Tensors) -> Result<Whole, RunError> {
        let Some(cluster) = self.cluster() else { return Ok(self.gather(tensors)) };
        let program = self.program();
        let mesh = program.context.mesh;
        let buffers =
            |device| tensors.of(&program.stages[Coordinates::of(device, &mesh).stage as usize]);
        let devices = self.devices().zip(&self.arenas);
        let own: Vec<&[f32]> = devices
            .flat_map(|(device, arena)| buffers(device).map(|b| arena.slice(numbers_of(b))))
            .collect();
        let mut made: Whole = BTreeMap::new();
        let count = |device| buffers(device).map(|buffer| numbers_of(buffer).len()).sum();
        cluster.collect(&own, count, |device, numbers| {
            // They came in the order in which they are placed.
            let mut rest = numbers;
            self.place(&mut made, tensors, device, |buffer| {
                let (these, others) = rest.split_at(numbers_of(buffer).len());
                rest = others;
                these
            });
        })?;
        Ok(made)
    }

    /// Puts what a device holds where it belongs; `numbers` gives those of every buffer in turn.
    fn place<'a>(
        &self,
        made: &mut Whole,
        tensors: Tensors,
        device: u64,
        mut numbers: impl FnMut(&Buffer) -> &'a [f32],
    ) {
        let program = self.program.program();
        let mesh = program.context.mesh;
        let at = Coordinates::of(device, &mesh);
        for buffer in tensors.of(&program.stages[at.stage as usize]) {
            let numbers = numbers(buffer);
            let window = Window::of(tensors, buffer, program, at.data);
            let Some(held) = Held::new(buffer, at.tensor, mesh.tensor, program.tied) else {
                continue;
            };
            let again = (held.whole() && at.tensor > 0) || (window.is_all() && at.data > 0);
            if again {
                continue;
            }
            held.each(|name, elements, number| {
                let Some((elements, at)) = window.place(elements, number) else { return };
                if !made.contains_key(name) {
                    let size = self.sizes.get(name).copied().unwrap_or(0);
                    made.insert(name.to_string(), vec![0.0; size]);
                }
                let elements = elements.start as usize..elements.end as usize;
                let target = made.get_mut(name).and_then(|whole| whole.get_mut(elements));
                if let Some(target) = target {
                    target.copy_from_slice(&numbers[at]);
                }
            });
        }
    }
}

/// Which of a parameter's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensors {
    /// The weights.
    Weights,
    /// Their gradients.
    Gradients,
    /// AdamW's first moments.
    FirstMoments,
    /// AdamW's second moments.
    SecondMoments,
}

impl Tensors {
    fn of<'a>(&self, stage: &'a StageProgram) -> impl Iterator<Item = &'a Buffer> + use<'a> {
        let (region, kind) = match self {
            Tensors::Weights => (Region::Weight, "weight"),
            Tensors::Gradients => (Region::Gradient, "gradient"),
            Tensors::FirstMoments => (Region::Optimizer, "first moment"),
            Tensors::SecondMoments => (Region::Optimizer, "second moment"),
        };
        stage.buffers.iter().filter(move |b| b.region == region && b.name.ends_with(kind))
    }
}

/// The numbers of a resident buffer in its arena.
pub(super) fn numbers_of(buffer: &Buffer) -> Range<usize> {
    let begin = (buffer.offset / 4) as usize;
    begin..begin + (buffer.extent.bytes().0 / 4) as usize
}

/// The numbers of a shard that one replica has, and where: with ZeRO-1 each has its own part of the
/// moments, and of the summed gradients.
struct Window {
    /// Which part of the shard, and how many numbers it has.
    part: Option<(u64, u64)>,
    /// Whether the buffer holds the part alone.
    alone: bool,
}

impl Window {
    fn of(tensors: Tensors, buffer: &Buffer, program: &Program, replica: u64) -> Window {
        let replicas = program.context.mesh.data;
        let alone = matches!(tensors, Tensors::FirstMoments | Tensors::SecondMoments);
        let parted = program.context.zero == Zero::One && tensors != Tensors::Weights;
        let numbers = buffer.extent.rows * buffer.extent.columns;
        let each = if alone { numbers } else { numbers / replicas };
        Window { part: parted.then_some((replica, each)), alone }
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

#[cfg(test)]
mod tests;
