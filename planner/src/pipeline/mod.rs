//! The pipeline: blocks divided among stages, and a step of the result simulated.
//!
//! | file | contents |
//! |---|---|
//! | `embedding_and_head` | solutions for embedding and head |
//! | `overhead` | times of a stage besides its blocks: embedding, head, transfers, the step phase |
//! | `assignment` | solutions for the blocks of one stage within its memory |
//! | `interleaved` | stages with several chunks |
//! | `step_bound` | lower bounds on the step of a pipeline, by schedule |
//! | `joint_bound` | the same from passes, reductions and updates of the same decisions |
//! | `joint_times` | the terms of these bounds, least over the decisions of each segment |
//! | `path_mean` | the same from a mean of paths, within the memory of all stages |
//! | `mixed_division` | partitions from the decisions of such a mean |
//! | `step_path` | the weights of a path of passes that a step waits for |
//! | `schedule_paths` | paths through a schedule, found by simulation |
//! | `roles` | what stages contribute to the paths of joint bounds |
//! | `stage_position` | the same because of one stage, from its passes and those around |
//! | `partition_bound` | the same of a partition |
//! | `prefix_sums` | sums over runs of blocks |
//! | `partition` | blocks divided among stages |
//! | `divisions` | the best divisions of one context, and bounds on all of them |
//! | `undominated` | the best divisions by their bounds |
//! | `partitioner` | assignments for every run of blocks of one context, cached |
//! | `relaxation` | lower bounds on the blocks of one stage, for all numbers of blocks |
//! | `refinement` | integer programs for stages where memory binds |
//! | `sharding` | work of sharded parameters that blocks do not count |
//! | `simulation` | step times of partitions before lowering |
//! | `step_phase_weights` | assignments that weigh the step phase of a stage less or more |

mod assignment;
mod divisions;
mod embedding_and_head;
mod in_flight;
mod interleaved;
mod joint_bound;
mod joint_times;
mod mixed_division;
mod overhead;
mod partition;
mod partition_bound;
mod partitioner;
mod path_mean;
mod prefix_sums;
mod refinement;
mod relaxation;
mod roles;
mod schedule_paths;
mod sharding;
mod simulation;
mod stage_position;
mod step_bound;
mod step_path;
mod step_phase_weights;
#[cfg(test)]
mod tests;
mod undominated;

pub use assignment::{AssignmentMethod, StageAssignment};
pub(crate) use embedding_and_head::EmbeddingAndHead;
pub(crate) use in_flight::{in_flight_in_chunk, in_flight_in_chunks};
pub(crate) use interleaved::{BlockTimesMin, stage_chunks};
pub(crate) use mixed_division::MixedDivision;
pub(crate) use overhead::PipelineOverheads;
pub use overhead::StageOverhead;
pub use partition::{Partition, PruningCutoff, StageBlocks};
pub(crate) use partitioner::StagePartitioner;
pub(crate) use path_mean::Multipliers;
pub(crate) use simulation::{simulate_partition, with_fastest_buckets};
pub use stage_position::StepSchedule;
pub use undominated::DivisionSearch;
