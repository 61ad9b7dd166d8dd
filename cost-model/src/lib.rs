//! Hardware profiles and prices.
//!
//! A [`Profile`] describes the performance of a device, its links and its executors. From it, [`Prices`] gives the
//! seconds of a kernel, [`PricedSpace`] turns the search space of a segment into a [`CostTable`], [`simulate()`] a
//! lowered program into a timeline, and [`interval`] gives the 90 % intervals of predictions. [`TrainingRunTerms`] turn the
//! time of a step into time, cost and energy of a whole run.

mod breakdown;
mod bytes_bound;
mod coalesced;
mod exact_step;
mod flow_time;
pub mod interval;
mod kernel_shape;
mod launch_queue;
mod memory;
mod op_order;
mod op_times;
mod overlap;
mod price;
mod priced_space;
pub mod profile;
mod segment_time;
mod sharding;
mod simulate;
mod stage_kernels;
mod stage_time;
mod step_phases;
mod table;
mod table_links;
mod training_run;
mod working_set;

pub use breakdown::Breakdown;
pub use exact_step::{ExactStepTime, ExactStepWork};
pub use kernel_shape::{KernelClass, MeasuredShapes, NEAR_OCTAVES, error_scale};
pub use launch_queue::LaunchQueue;
pub use memory::{DeferredBytes, InFlight, SegmentBytes, deferred_bytes, kept_bytes};
pub use op_times::OpTimes;
pub use overlap::{BucketTime, EarlyBucket, GatherTime, OverlapSlowdown, SplitBucketTime};
pub use price::{GroupLinks, KernelPrice, PriceSource, Prices, StreamPrices, scale_measurements};
pub use priced_space::{ChoiceBytes, MemoryRows, PricedSpace, decode_assignment, pass_time};
pub use profile::{Executor, Profile};
pub use segment_time::{PartTimes, PassTimesMin, SegmentTime, StepWeights};
pub use sharding::ShardingMin;
pub use simulate::{
    BucketSpan, PassSpan, SimulatedStep, StageSync, Timeline, schedule_time, simulate,
    simulate_schedules,
};
pub use stage_kernels::instruction_spans;
pub use stage_time::{
    PassTimes, StageOverlap, StageTime, StepPart, SyncedStages, stage_sync_group,
};
pub use step_phases::StepPhases;
pub use table::{
    Assignment, CostTable, MemoryRow, MemoryRowId, TableChoice, TableLink, TableNode, TableNodeId,
};
pub use training_run::{
    EndlessRun, FailureEstimate, FailureTerms, StepEstimate, TrainingRunEstimate, TrainingRunTerms,
};
pub use working_set::{WorkingBytes, WorkingSet};
