//! The core of the runtime: sessions, training, token files, checkpoints, and the code that backends share.
//!
//! A [`Session`] holds the memory of a program's devices and runs steps on them through an
//! [`Engine`](session::Engine). Backends are crates of their own that implement it: `narrows-cpu`
//! and `narrows-cuda`. `narrows-cluster` implements [`process_group`] for runs of many processes,
//! and `narrows-reference` is the unsharded oracle. None of these crates imports another.
//!
//! This crate depends on `narrows-plan` alone: it never sees a price, a profile or a search.
//!
//! | module | contents |
//! |---|---|
//! | [`session`] | a program with the memory of its devices, and the trait of engines |
//! | [`train`] | the training loop and its metrics |
//! | [`data`] | token files and the sampler |
//! | [`checkpoint`] | checkpoints: saving, loading, resuming |
//! | [`interchange`] | weights in the files of other training codes |
//! | [`process_group`] | traits of a run of many processes, and their errors |
//!
//! The crate root exports what engines and reports share: the order of a step's instructions, operand
//! addresses, parameters and their initial values, the optimizer, counts and times of a step.

mod addressing;
mod atomic_file;
pub mod checkpoint;
pub mod data;
mod digest;
mod eigenpairs;
mod error;
mod gemm_dtype;
mod instruction_order;
pub mod interchange;
mod learning_rate;
mod loro;
mod measure;
mod null;
mod optimizer;
mod parameters;
mod pipeline_direction;
pub mod process_group;
mod random;
mod report;
mod serde_default;
pub mod session;
mod time_breakdown;
pub mod train;

pub use addressing::{operand_range, replica_operand_range};
pub use atomic_file::{AtomicFile, AtomicFolder, link_target};
pub use digest::{Sha256Digest, sha256};
pub use error::{DeviceError, RunError};
pub use gemm_dtype::GemmDtype;
pub use instruction_order::{
    PartOrder, PassPart, ScheduledInstruction, pass_parts, scheduled_instructions,
};
pub use learning_rate::{LearningRateSchedule, StepCount};
pub use loro::{ExactStepFault, FactorRateScale, FactorStep, Loro, PairShape, exact_step};
pub use measure::{InstructionTimings, KernelSample, MeasurementEffort, time_instructions};
pub use null::count_step;
pub use optimizer::{DecayedWeights, FactorRate, Optimizer, StepCoefficients, UpdateGroup};
pub use parameters::{Initialisation, LogicalParameter, ParameterKind, logical_parameters};
pub use pipeline_direction::PipelineDirection;
pub use random::{CounterRng, fnv1a, random_stream_name};
pub use report::{
    BytesByKindAndAxis, CollectiveCount, DeviceId, DeviceReport, StepReport, bytes_sent_per_member,
};
pub use session::{IGNORED_TARGET, Session};
pub use time_breakdown::{InstructionSpan, TimeBreakdown, TimeCategory};
pub use train::Trainer;
