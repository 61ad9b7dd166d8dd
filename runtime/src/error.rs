//! Why a step of a program fails.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use narrows_plan::Bytes;
use narrows_plan::program::Phase;

use crate::process_group::ClusterError;

/// Why a step did not end.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// An operand lies outside its device's memory.
    #[error(
        "stage {stage}, {phase:?} of microbatch {microbatch}, {origin}: `{buffer}` ends at byte \
         {end} of an arena of {arena}"
    )]
    OutsideArena {
        /// The pipeline stage.
        stage: usize,
        /// The pass.
        phase: Phase,
        /// The microbatch; 0 in the step phase.
        microbatch: u64,
        /// Where the instruction comes from.
        origin: String,
        /// The operand.
        buffer: String,
        /// One past its last byte.
        end: u64,
        /// The size of the arena.
        arena: Bytes,
    },
    /// A device received another number of bytes than was sent to it.
    #[error("stage {stage}, {origin}: receives {received} of a transfer that sends {sent}")]
    OtherTransfer {
        /// The receiving stage.
        stage: usize,
        /// Where the receiving instruction comes from.
        origin: String,
        /// What the sender sent.
        sent: Bytes,
        /// What the receiver has room for.
        received: Bytes,
    },
    /// Every stage that is not done waits for another.
    #[error("stage {stage}, {origin}: waits for a transfer that nothing will send")]
    Stuck {
        /// The first stage that waits.
        stage: usize,
        /// Where the waiting instruction comes from.
        origin: String,
    },
    /// A backend cannot execute an instruction.
    #[error("stage {stage}, {phase:?} of microbatch {microbatch}, {origin}: {why}")]
    Unfit {
        /// The pipeline stage.
        stage: usize,
        /// The pass.
        phase: Phase,
        /// The microbatch; 0 in the step phase.
        microbatch: u64,
        /// Where the instruction comes from.
        origin: String,
        /// Why not.
        why: &'static str,
    },
    /// The processor backend computes in f32 alone.
    #[error(
        "the program is in mixed bf16, and processors compute in f32 (try: a plan for cpu-local)"
    )]
    Precision,
    /// The program and the model do not belong together.
    #[error("the program is not one of `{model}`: sizes, constants or parameters differ")]
    OtherModel {
        /// The model's name.
        model: String,
    },
    /// Threads could not be started, or one broke off.
    #[error("the devices' threads: {why}")]
    Threads {
        /// What the system says.
        why: String,
    },
    /// Another process of the run is gone, late, or ended it.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A device of a backend, or a library that it needs, fails.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A device is a process, and there is another number of them.
    #[error(
        "the program is for {devices} devices, and {processes} processes were started (try: as many \
         processes, one a device, or a plan for so many)"
    )]
    Processes {
        /// Devices of the program.
        devices: u64,
        /// Processes of the cluster.
        processes: u64,
    },
    /// A process made a step on other tokens than process 0.
    #[error(
        "process {process} reads other tokens than process 0 (try: a token file that is the same for \
         all processes)"
    )]
    OtherTokens {
        /// Its number.
        process: u64,
    },
    /// A step was given another number of tokens than the program runs.
    #[error("a step takes {wanted} tokens and as many targets, not {tokens} and {targets}")]
    BatchSize {
        /// Tokens of the global batch.
        wanted: u64,
        /// Tokens given.
        tokens: usize,
        /// Targets given.
        targets: usize,
    },
    /// A token id that the vocabulary does not have.
    #[error(
        "token {token} at position {position} of the batch is outside the vocabulary of {vocab}"
    )]
    Token {
        /// The id.
        token: u32,
        /// Where in the global batch.
        position: usize,
        /// Tokens of the vocabulary.
        vocab: u64,
    },
    /// Loss or gradients are infinite or no numbers.
    #[error(
        "step {step}: the loss is {loss} and the gradients are not finite; no weight was changed \
         (try: a smaller learning rate, or a longer warm-up)"
    )]
    NotFinite {
        /// The step that was not made.
        step: u64,
        /// Its loss.
        loss: f64,
    },
}

/// An error of a backend's device. The backend's own error type is behind [`DeviceError::source_as`].
#[derive(Clone, Debug)]
pub struct DeviceError(Arc<dyn Error + Send + Sync>);

impl DeviceError {
    /// Wraps an error of a backend.
    pub fn new(error: impl Error + Send + Sync + 'static) -> DeviceError {
        DeviceError(Arc::new(error))
    }

    /// The backend's error, if it is an `E`.
    pub fn source_as<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for DeviceError {}

/// Errors with the same message are equal.
impl PartialEq for DeviceError {
    fn eq(&self, other: &DeviceError) -> bool {
        self.to_string() == other.to_string()
    }
}
