//! Memory, modules and communicators of an executor.

use std::sync::Arc;
use std::time::Duration;

use narrows_runtime::process_group::ProcessGroup;

use crate::device::communicators::NcclCommunicators;
use crate::device::cublaslt::CublasLt;
use crate::device::cudnn::Cudnn;
use crate::device::inputs::TokenInputs;
use crate::device::modules::{DeviceBuffers, KernelModules};

/// Resources for the execution of a schedule.
pub(crate) struct ExecutorResources {
    pub cublaslt: CublasLt,
    /// `None` where no attention runs by cuDNN.
    pub cudnn: Option<Cudnn>,
    pub buffers: DeviceBuffers,
    pub inputs: TokenInputs,
    pub modules: KernelModules,
    /// The process group and its communicators; `None` for a single device.
    pub peers: Option<(Arc<dyn ProcessGroup>, NcclCommunicators)>,
    /// Maximum time without progress in a step.
    pub timeout: Duration,
}
