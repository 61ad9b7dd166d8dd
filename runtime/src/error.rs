//! Errors of a step.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use narrows_plan::Bytes;
use narrows_plan::program::MicrobatchPass;

use crate::loro::ExactStepFault;
use crate::process_group::{ClusterError, ClusterFault, ProcessGroup};

/// Error of opening a session or of executing a step.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// An operand lies outside its device's arena.
    #[error(
        "stage {stage}, {pass}, {origin}: `{buffer}` ends at byte {end} of an arena of {arena}"
    )]
    OutsideArena {
        /// Pipeline stage.
        stage: usize,
        /// Pass of the instruction.
        pass: MicrobatchPass,
        /// Origin of the instruction.
        origin: String,
        /// Name of the operand's buffer.
        buffer: String,
        /// One past the last byte of the operand.
        end: u64,
        /// Size of the arena.
        arena: Bytes,
    },
    /// The operands of a receive have another size than those of its send.
    #[error("stage {stage}, {origin}: receives {received} of a transfer that sends {sent}")]
    TransferSizeMismatch {
        /// The receiving stage.
        stage: usize,
        /// Origin of the receive instruction.
        origin: String,
        /// Size of the transfer.
        sent: Bytes,
        /// Size of the receive operands.
        received: Bytes,
    },
    /// Every unfinished stage waits for another.
    #[error("stage {stage}, {origin}: deadlock, waits for a transfer that no stage will send")]
    Deadlock {
        /// The first stage that waits.
        stage: usize,
        /// Origin of the waiting instruction.
        origin: String,
    },
    /// A backend cannot execute an instruction.
    #[error("stage {stage}, {pass}, {origin}: {reason}")]
    Unsupported {
        /// Pipeline stage.
        stage: usize,
        /// Pass of the instruction.
        pass: MicrobatchPass,
        /// Origin of the instruction.
        origin: String,
        /// Reason why the backend cannot execute the instruction.
        reason: &'static str,
    },
    /// The CPU backend computes in f32 alone.
    #[error("the program is in mixed bf16, and the CPU backend computes in f32")]
    UnsupportedPrecision,
    /// This processor has no instruction for products of bf16 numbers.
    #[error("this processor cannot multiply bf16 numbers: it does not have AVX512_BF16")]
    UnsupportedGemmDtype,
    /// The program was not lowered from a plan of this model.
    #[error("the program is not one of `{model}`: sizes, constants or parameters differ")]
    ModelMismatch {
        /// Name of the model.
        model: String,
    },
    /// Threads could not be started.
    #[error("device threads: the system refuses them: {reason}")]
    DeviceThreads {
        /// The error of the operating system.
        reason: String,
    },
    /// The thread of a device panicked.
    #[error("a device's thread panicked")]
    DeviceThreadPanicked,
    /// Another process of the run is gone, late, or aborted the run.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A device of a backend, or a library that it needs, failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The number of processes is not the number of devices.
    #[error("the program is for {devices} devices, and {processes} processes were started")]
    ProcessCountMismatch {
        /// Devices of the program.
        devices: u64,
        /// Processes of the run.
        processes: u64,
    },
    /// A process executed a step on other tokens than rank 0.
    #[error("process {rank} reads a different token file than process 0")]
    TokensMismatch {
        /// The rank.
        rank: u64,
    },
    /// The batch does not have the size that the program was planned for.
    #[error("a step takes {expected} tokens and as many targets, not {tokens} and {targets}")]
    BatchSizeMismatch {
        /// Tokens of the program's global batch.
        expected: u64,
        /// Tokens of the batch.
        tokens: usize,
        /// Targets of the batch.
        targets: usize,
    },
    /// A token id is outside the vocabulary.
    #[error(
        "token {token} at position {position} of the batch is outside the vocabulary of {vocab}"
    )]
    TokenOutOfVocabulary {
        /// The id.
        token: u32,
        /// Position in the global batch.
        position: usize,
        /// Size of the vocabulary.
        vocab: u64,
    },
    /// The loss or the gradients are infinite or NaN.
    #[error("step {step}: the gradients are not finite (loss {loss}); no weight was changed")]
    NonFiniteGradients {
        /// The step that was not applied.
        step: u64,
        /// Loss of that step.
        loss: f64,
    },
    /// The optimizer cannot train the program.
    #[error("LORO: {reason}")]
    UnsupportedOptimizer {
        /// Reason why it cannot.
        reason: String,
        /// Advice for the user.
        hint: &'static str,
    },
    /// The exact step of a factor pair has no result.
    #[error("step {step}: the exact step of LORO on {linear} has no result: {fault}")]
    ExactStep {
        /// The step.
        step: u64,
        /// Name of the linear.
        linear: String,
        /// Reason.
        fault: ExactStepFault,
    },
}

impl RunError {
    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        const BUG: &str =
            "`narrows check PLAN` proves a plan; if it passes, this is a bug of this program";
        let hint = match self {
            RunError::OutsideArena { .. }
            | RunError::TransferSizeMismatch { .. }
            | RunError::Deadlock { .. }
            | RunError::Unsupported { .. } => BUG,
            RunError::DeviceThreadPanicked => "this is a bug of this program",
            RunError::UnsupportedPrecision => "a plan for cpu-local",
            RunError::UnsupportedGemmDtype => "--dtype f32",
            RunError::ModelMismatch { .. } => "the model that the plan was made for",
            RunError::DeviceThreads { .. } => {
                "fewer threads per device, or a higher limit of the system (`ulimit -u`)"
            }
            RunError::Cluster(error) => return error.fault.hint().map(str::to_owned),
            RunError::Device(error) => return error.hint().map(str::to_owned),
            RunError::ProcessCountMismatch { processes, .. } => {
                return Some(format!(
                    "one process for each device, or a plan for {processes} devices"
                ));
            }
            RunError::TokensMismatch { .. } => "a token file that is the same for all processes",
            RunError::BatchSizeMismatch { .. } => "the tokens and targets of one global batch",
            RunError::TokenOutOfVocabulary { .. } => {
                "a model with this vocabulary, or the same text through the model's tokenizer"
            }
            RunError::NonFiniteGradients { .. } => "a smaller learning rate, or a longer warm-up",
            RunError::UnsupportedOptimizer { hint, .. } => hint,
            RunError::ExactStep { fault: ExactStepFault::RankDeficient { .. }, .. } => {
                "initial weights of full rank, smaller ranks, or --optimizer adamw"
            }
            RunError::ExactStep { .. } => "a smaller learning rate, or --optimizer adamw",
        };
        Some(hint.into())
    }

    /// Ends the run of all processes because of this error. If another process aborted the run, its rank
    /// and reason are passed on.
    pub fn abort_run(&self, group: &dyn ProcessGroup) {
        match self {
            RunError::Cluster(ClusterError {
                fault: ClusterFault::Aborted { rank, reason },
                ..
            }) => group.abort(*rank, reason),
            // Without the last operations of this process.
            RunError::Cluster(ClusterError { fault, .. }) => {
                group.abort(group.rank(), &fault.to_string());
            }
            error => group.abort(group.rank(), &error.to_string()),
        }
    }
}

/// An error of a backend's device. [`DeviceError::source_as`] gives access to the backend's own error
/// type.
#[derive(Clone, Debug)]
pub struct DeviceError {
    source: Arc<dyn Error + Send + Sync>,
    hint: Option<String>,
}

impl DeviceError {
    /// Wraps an error of a backend, with advice for the user.
    pub fn new(error: impl Error + Send + Sync + 'static, hint: Option<String>) -> DeviceError {
        DeviceError { source: Arc::new(error), hint }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The backend's error, if it is an `E`.
    pub fn source_as<E: Error + 'static>(&self) -> Option<&E> {
        self.source.downcast_ref()
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for DeviceError {}

/// Errors with the same message are equal.
impl PartialEq for DeviceError {
    fn eq(&self, other: &DeviceError) -> bool {
        self.to_string() == other.to_string()
    }
}
