//! Ring attention: [`Attention`] whose keys and values rotate around a device group.
//!
//! Of 2C chunks of c = S/(2C) positions, device i has the chunks i and 2C − 1 − i. In step t it has the keys and values
//! of device j = (i − t) mod C, and sends them on to device i + 1 meanwhile:
//!
//! - j = i: its own two chunks, a causal square of 2c queries, c(2c + 1) scores;
//! - j < i: both chunks of queries see all of chunk j and nothing of chunk 2C − 1 − j, 2c² scores;
//! - j > i: the later chunk of queries sees both chunks of keys, 2c² scores.
//!
//! So all devices have equal work in every step. The step is priced as the causal square. Outputs of steps are merged by
//! their log-sum-exp. In the backward pass the gradients of keys and values follow them in fp32, one step behind: each
//! device adds its contribution to those that arrive, and after C shifts they are at home.

use std::cmp::Ordering;
use std::ops::Range;

use crate::extent::Extent;
use crate::kernel::{Attention, Collective, CollectiveKind, Direction, FusedKernel, Kernel};
use crate::mesh::DeviceGroup;
use crate::{Bytes, DType};

/// Parts of keys and values in flight: one that is sent, and one that arrives.
pub const RING_KEY_PARTS: u64 = 2;

/// Gradients of parts in flight: sums that are sent, and sums that arrive.
pub const RING_GRADIENT_PARTS: u64 = 2;

/// Operands of scratch memory that ring attention writes besides its results: those of [`RingScratch`].
pub const RING_SCRATCH_OPERANDS: usize = 2;

/// Rows of a sequence on a device whose scores the mask leaves in a step of a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingStepRows {
    /// Rows of the device's queries.
    pub queries: Range<u64>,
    /// Rows of the keys that have arrived: the first ones.
    pub keys: u64,
    /// Position of the first of these queries, counted from the first key.
    pub first_query: u64,
}

impl RingStepRows {
    /// The rows in a step of the device at a place of this many, with so many positions of each sequence.
    pub fn new(step: u64, (place, places): (u64, u64), positions: u64) -> RingStepRows {
        let chunk = positions / 2;
        let owner = (place + places - step) % places;
        let (queries, keys, first_query) = match owner.cmp(&place) {
            Ordering::Equal => (0..positions, positions, 0),
            Ordering::Less => (0..positions, chunk, chunk),
            Ordering::Greater => (chunk..positions, positions, positions),
        };
        RingStepRows { queries, keys, first_query }
    }
}

/// Steps of a ring with the same kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSteps {
    /// Number of steps.
    pub count: u64,
    /// Kernels that run beside the shift, each with its number in a step: attention to the keys of a part, and what
    /// merges its results.
    pub beside_shift: Vec<CountedKernel>,
    /// Kernels that run while no shift does, each with its number in a step.
    pub without_shift: Vec<CountedKernel>,
    /// The shift.
    pub shift: Option<Collective>,
}

/// A kernel and how often it runs.
type CountedKernel = (u64, Kernel);

/// Scratch memory of ring attention: of each operand, its matrices one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingScratch {
    /// In the format of the inputs: two parts of keys and values in flight, the output of a step (the gradient of the
    /// queries in a backward pass), and in a backward pass the contributions of a step to the gradients of a part.
    pub parts: Extent,
    /// In fp32: sums of outputs (of the gradients of queries) where the format of the inputs is another; then the
    /// log-sum-exp of a step or, in a backward pass, two parts of gradients in flight.
    pub sums: Extent,
}

impl Attention {
    /// The devices around which keys and values rotate; `None` for one device.
    pub fn rotation(&self) -> Option<DeviceGroup> {
        self.ring.filter(|ring| ring.size > 1)
    }

    /// Columns of the keys and values of a device.
    pub fn key_columns(&self) -> u64 {
        2 * self.kv_heads * self.head_dim
    }

    /// Scratch memory on a device; `None` where no keys rotate.
    pub fn ring_scratch(&self) -> Option<RingScratch> {
        self.rotation()?;
        let (outputs, keys) = (self.heads * self.head_dim, self.key_columns());
        let summed = if self.input == DType::F32 { 0 } else { outputs };
        let (parts, sums) = match self.direction {
            Direction::Forward => (RING_KEY_PARTS * keys + outputs, summed + self.heads),
            Direction::Backward => {
                ((RING_KEY_PARTS + 1) * keys + outputs, summed + RING_GRADIENT_PARTS * keys)
            }
        };
        let rows = self.sequences * self.queries();
        Some(RingScratch {
            parts: Extent { rows, columns: parts, dtype: self.input },
            sums: Extent { rows, columns: sums, dtype: DType::F32 },
        })
    }

    /// The steps of a ring in their order, with the kernels of the device that has the most; `None` where no keys rotate.
    ///
    /// That is a device between the first and the last where there is one: in the step in which its earlier chunk of queries has
    /// its last keys, but its later chunk has not, it merges the results of each by a kernel of its own.
    pub fn ring_steps(&self) -> Option<Vec<RingSteps>> {
        let group = self.rotation()?;
        let rows = self.sequences * self.queries();
        let shift = |dtypes: &[DType]| {
            let bytes: Bytes = dtypes.iter().map(|d| d.bytes(rows * self.key_columns())).sum();
            Some(Collective { kind: CollectiveKind::Shift, payload: bytes * group.size, group })
        };
        let (input, sum) = (self.input, DType::F32);
        let attention = Kernel::Attention(Attention {
            length: self.queries(),
            query_parts: 1,
            ring: Some(DeviceGroup { size: 1, ..group }),
            ..self.clone()
        });
        let attention = (1, attention);
        // Kernels that read or write so many rows and columns in each of these formats.
        let kernels = |count: u64, [rows, columns]: [u64; 2], dtypes: &[DType]| {
            let traffic = dtypes.iter().map(|dtype| dtype.bytes(rows * columns)).sum();
            (count, Kernel::Fused(FusedKernel::memory_pass(traffic)))
        };
        let keys = self.key_columns();
        // One of keys and one of values.
        let of_keys_and_values = |dtypes: &[DType]| kernels(2, [rows, keys / 2], dtypes);
        let outputs = self.heads * self.head_dim;
        let merged = match self.direction {
            Direction::Forward => outputs + self.heads,
            Direction::Backward => outputs,
        };
        let [merge, merge_apart] =
            &[1, 2].map(|count| kernels(count, [rows / count, merged], &[sum, input, sum]));
        let pack = &of_keys_and_values(&[input, input]);
        let steps =
            |count, beside: &[&CountedKernel], without: &[&CountedKernel], shift| RingSteps {
                count,
                beside_shift: beside.iter().copied().cloned().collect(),
                without_shift: without.iter().copied().cloned().collect(),
                shift,
            };
        // Steps between the first and the last, in one of which the chunks of queries are merged apart.
        let between = group.size - 2;
        let of_one = between.min(1);
        let others = between - of_one;
        Some(match self.direction {
            Direction::Forward => vec![
                steps(1, &[&attention], &[pack], shift(&[input])),
                steps(of_one, &[&attention, merge_apart], &[], shift(&[input])),
                steps(others, &[&attention, merge], &[], shift(&[input])),
                steps(1, &[&attention, merge], &[], None),
            ],
            Direction::Backward => {
                let convert = &kernels(1, [rows, keys], &[input, sum]);
                let add = &kernels(1, [rows, keys], &[sum, input, sum]);
                let write = &of_keys_and_values(&[input, sum]);
                let first: &[&CountedKernel] =
                    if input == sum { &[&attention] } else { &[&attention, convert] };
                vec![
                    steps(1, first, &[pack], shift(&[input])),
                    steps(of_one, &[&attention, merge_apart], &[add], shift(&[input, sum])),
                    steps(others, &[&attention, merge], &[add], shift(&[input, sum])),
                    steps(1, &[&attention, merge], &[add], shift(&[sum])),
                    steps(1, &[], &[write], shift(&[sum])),
                ]
            }
        })
    }

    /// The shifts of a ring, each with the number of times that it happens; none where no keys rotate.
    pub fn ring_shifts(&self) -> Vec<(u64, Collective)> {
        let steps = self.ring_steps().into_iter().flatten();
        steps.filter_map(|steps| Some((steps.count, steps.shift?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Axis;

    /// Scores of the queries of chunk a that see keys of chunk b, of `size` positions each.
    fn scores(size: u64, a: u64, b: u64) -> u64 {
        let queries = a * size..(a + 1) * size;
        queries.map(|query| (query + 1).clamp(b * size, (b + 1) * size) - b * size).sum()
    }

    /// The rows of a step are those with a score, and have no others but the triangle of a device's own keys.
    #[test]
    fn rows_of_a_step_have_all_scores_that_the_mask_leaves() {
        for (places, size) in [(2, 1), (2, 3), (3, 4), (5, 2), (8, 3)] {
            for (place, step) in (0..places).flat_map(|place| (0..places).map(move |t| (place, t)))
            {
                let rows = RingStepRows::new(step, (place, places), 2 * size);
                let queries = rows.queries.end - rows.queries.start;
                let visible = |query: u64| (rows.first_query + query + 1).min(rows.keys);
                let counted: u64 = (0..queries).map(visible).sum();
                let owner = (place + places - step) % places;
                let chunks = |place: u64| [place, 2 * places - 1 - place];
                let pairs = chunks(place).into_iter();
                let pairs = pairs.flat_map(|a| chunks(owner).map(|b| scores(size, a, b)));
                assert_eq!(counted, pairs.sum::<u64>(), "{places}, {place}, {step}");
            }
        }
    }

    #[test]
    fn devices_have_equal_work_in_every_step() {
        for (places, size) in [(2, 1), (2, 3), (3, 4), (5, 2), (8, 3)] {
            let chunks = |place: u64| [place, 2 * places - 1 - place];
            let mut all = 0;
            for step in 0..places {
                let of_place = |place: u64| -> u64 {
                    let owner = (place + places - step) % places;
                    let pairs = chunks(place).into_iter();
                    let pairs = pairs.flat_map(|a| chunks(owner).map(|b| scores(size, a, b)));
                    pairs.sum()
                };
                let square = size * (2 * size + u64::from(step == 0));
                assert!((0..places).all(|place| of_place(place) == square), "{places}, {step}");
                all += square;
            }
            let attention = attention(Direction::Forward, places, 2 * places * size);
            assert_eq!(attention.scores(), all as f64);
        }
    }

    fn attention(direction: Direction, places: u64, length: u64) -> Attention {
        Attention {
            direction,
            sequences: 3,
            length,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            input: DType::Bf16,
            window: None,
            query_parts: places,
            ring: Some(DeviceGroup { axis: Axis::Context, size: places, stride: 1 }),
        }
    }

    /// Keys and values move C − 1 times, their gradients C times.
    #[test]
    fn parts_visit_every_device_and_gradients_come_home() {
        for places in [2, 3, 8] {
            let elements = 3 * 16 * 2 * 2 * 8;
            for (direction, expected) in [
                (Direction::Forward, (places - 1) * elements * 2),
                (Direction::Backward, (places - 1) * elements * 2 + places * elements * 4),
            ] {
                let attention = attention(direction, places, 16 * places);
                let sent: u64 = attention
                    .ring_shifts()
                    .iter()
                    .map(|(count, shift)| count * shift.payload.0 / places)
                    .sum();
                assert_eq!(sent, expected);
                let steps = attention.ring_steps().unwrap();
                let computed = steps.iter().filter(|steps| !steps.beside_shift.is_empty());
                assert_eq!(computed.map(|steps| steps.count).sum::<u64>(), places);
            }
        }
    }

    #[test]
    fn scratch_holds_parts_in_flight_and_sums() {
        let scratch = |direction| attention(direction, 4, 64).ring_scratch().unwrap();
        let (forward, backward) = (scratch(Direction::Forward), scratch(Direction::Backward));
        let parts = |columns| Extent { rows: 48, columns, dtype: DType::Bf16 };
        assert_eq!((forward.parts, backward.parts), (parts(3 * 32), parts(4 * 32)));
        let sums = |columns| Extent { rows: 48, columns, dtype: DType::F32 };
        assert_eq!((forward.sums, backward.sums), (sums(32 + 4), sums(3 * 32)));
        let whole = Attention { ring: None, ..attention(Direction::Forward, 4, 64) };
        assert_eq!((whole.ring_scratch(), whole.ring_steps()), (None, None));
    }
}
