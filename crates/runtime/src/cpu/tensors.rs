//! Parameters, their gradients and moments, in and out of the arenas as whole tensors.

use std::collections::BTreeMap;

use narrows_plan::model::Model;
use narrows_plan::program::{Buffer, Program, Region, StageProgram};
use narrows_plan::strategy::Zero;

use super::device::Coordinates;
use super::session::Session;
use super::weights::Held;
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
                (name == parameter.name)
                    .then_some(|element| value(element / columns, element % columns) as f32)
            });
        }
    }

    /// Sets tensors, by logical name, from whole ones; names that are not there stay as they are.
    ///
    /// # Panics
    /// When a tensor has fewer elements than its parameter.
    pub fn load(&mut self, tensors: Tensors, whole: &Whole) {
        self.set(tensors, |name| {
            whole.get(name).map(|whole| |element: u64| whole[element as usize])
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

    /// Sets what is held of some parameters.
    fn set<F: Fn(u64) -> f32>(&mut self, tensors: Tensors, values: impl Fn(&str) -> Option<F>) {
        let program = self.program.program();
        let mesh = program.context.mesh;
        for (device, arena) in self.arenas.iter_mut().enumerate() {
            let at = Coordinates::of(device as u64, &mesh);
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
                held.each(|name, element, number| {
                    let known = known.iter().find(|(known, _)| known == name);
                    if let (Some((_, value)), Some(at)) = (known, window.place(number)) {
                        numbers[at] = value(element);
                    }
                });
            }
        }
    }

    /// Whole tensors, by logical name. Gradients are those that
    /// [`gradients_only`](Session::gradients_only) left.
    pub fn gather(&self, tensors: Tensors) -> Whole {
        let program = self.program.program();
        let mesh = program.context.mesh;
        let mut made: Whole = BTreeMap::new();
        for (device, arena) in self.arenas.iter().enumerate() {
            let at = Coordinates::of(device as u64, &mesh);
            for buffer in tensors.of(&program.stages[at.stage as usize]) {
                let window = Window::of(tensors, buffer, program, at.data);
                let Some(held) = Held::new(buffer, at.tensor, mesh.tensor, program.tied) else {
                    continue;
                };
                let again = (held.whole() && at.tensor > 0) || (window.is_all() && at.data > 0);
                if again {
                    continue;
                }
                let numbers = arena.slice(numbers_of(buffer));
                held.each(|name, element, number| {
                    let Some(at) = window.place(number) else { return };
                    let size = self.sizes.get(name).copied().unwrap_or(0);
                    let whole = made.entry(name.to_string()).or_insert_with(|| vec![0.0; size]);
                    if let Some(target) = whole.get_mut(element as usize) {
                        *target = numbers[at];
                    }
                });
            }
        }
        made
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
pub(super) fn numbers_of(buffer: &Buffer) -> std::ops::Range<usize> {
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

    /// Where a number of the shard is in the buffer, when this replica has it.
    fn place(&self, number: u64) -> Option<usize> {
        match self.part {
            None => Some(number as usize),
            Some((replica, each)) => {
                let here = number / each.max(1) == replica;
                here.then_some(if self.alone { number % each.max(1) } else { number } as usize)
            }
        }
    }
}
