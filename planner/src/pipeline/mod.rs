//! The pipeline: blocks divided among stages, and a step of the result simulated.
//!
//! | file | what it holds |
//! |---|---|
//! | `embedding_and_head` | solutions for embedding and head |
//! | `overhead` | what a stage runs besides its blocks: embedding, head, transfers, the step phase |
//! | `assignment` | solutions for the blocks of one stage within its memory |
//! | `partition` | blocks divided among stages: the bound of a 1F1B step, and the best divisions by it |
//! | `partitioner` | assignments for every run of blocks of one context, cached |
//! | `refinement` | integer programs for a stage whose memory binds |
//! | `simulation` | the step time of a partition, before it is lowered |

mod assignment;
mod embedding_and_head;
mod in_flight;
mod overhead;
mod partition;
mod partitioner;
mod refinement;
mod simulation;

pub use assignment::{AssignmentMethod, StageAssignment};
pub use embedding_and_head::EmbeddingAndHead;
pub use in_flight::in_flight;
pub use overhead::StageOverhead;
pub use partition::{Partition, PruningCutoff, division_bound, undominated_partitions};
pub use partitioner::StagePartitioner;
pub use simulation::simulate_partition;
