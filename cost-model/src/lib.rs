//! Hardware profiles and prices.
//!
//! A [`Profile`] says what a device, its links and its executors can do. [`Prices`] turns a kernel into seconds
//! with it, [`PricedSpace`] a segment's search space into a [`CostTable`], and [`simulate()`] a lowered program
//! into a timeline. [`interval`] says how far such a prediction may be off.

pub mod interval;
mod kernel_shape;
mod memory;
mod price;
pub mod profile;
mod segment;
mod simulate;
mod table;

pub use kernel_shape::{KernelClass, MeasuredShapes, NEAR_OCTAVES, error_scale};
pub use memory::{SegmentBytes, segment_bytes};
pub use price::{KernelPrice, PriceSource, Prices};
pub use profile::{Executor, Profile};
pub use segment::{
    KEPT_ROW, PricedSpace, RESIDENT_ROW, SegmentTime, decode_assignment, segment_time,
};
pub use simulate::{
    Breakdown, PassSpan, SimulatedStep, StageSync, StageTime, StepPart, SyncedStages, Timeline,
    schedule_time, simulate, simulate_schedules, stage_sync_group,
};
pub use table::{
    Assignment, CostTable, MemoryRow, MemoryRowId, TableChoice, TableLink, TableNode, TableNodeId,
};
