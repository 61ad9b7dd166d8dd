//! The threads of a session's devices. They live as long as the session, so that memory which a
//! thread allocates for itself, as GEMMs do for packing, is still there in the next step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use narrows_runtime::RunError;
use narrows_runtime::session::DeviceStep;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use crate::abort::{AbortFlag, StopReason};
use crate::device::CpuDevice;
use crate::execute;

/// The threads of all devices of a process.
pub(crate) struct DeviceThreads {
    /// One thread for each device. A single device runs on the thread that calls for a step.
    devices: Option<ThreadPool>,
    /// For each device, the threads that its kernels are divided among, if there is more than one.
    kernels: Vec<Option<ThreadPool>>,
}

/// Result of a step on one device.
pub(crate) struct DeviceOutcome<'a> {
    /// Reason why the device stopped before the end of the step, if it did.
    pub stop_reason: Option<StopReason>,
    pub step: DeviceStep<'a>,
}

impl DeviceOutcome<'_> {
    /// Takes the error of a device that failed.
    pub fn take_failure(&mut self) -> Option<RunError> {
        match self.stop_reason.take() {
            Some(StopReason::Failed(error)) => Some(*error),
            other => {
                self.stop_reason = other;
                None
            }
        }
    }
}

impl DeviceThreads {
    /// Threads for `devices` devices, each of which uses `threads` threads.
    pub fn new(devices: usize, threads: usize) -> Result<DeviceThreads, ThreadPoolBuildError> {
        let pool = |threads: usize| {
            let builder = ThreadPoolBuilder::new().num_threads(threads);
            (threads > 1).then(|| builder.build()).transpose()
        };
        let kernels = (0..devices).map(|_| pool(threads)).collect::<Result<_, _>>()?;
        Ok(DeviceThreads { devices: pool(devices)?, kernels })
    }

    /// Runs a step on all devices concurrently, since they wait for each other.
    pub fn run<'a>(&self, devices: Vec<CpuDevice<'a>>) -> Result<Vec<DeviceOutcome<'a>>, RunError> {
        let Some(threads) = &self.devices else {
            let devices = devices.into_iter().zip(&self.kernels);
            return Ok(devices
                .map(|(mut device, pool)| {
                    let stop_reason = run_device(&mut device, pool.as_ref()).err();
                    outcome(device, stop_reason)
                })
                .collect());
        };
        let slots: Vec<Mutex<DeviceSlot>> = devices
            .into_iter()
            .map(|device| Mutex::new(DeviceSlot { device, stop_reason: None }))
            .collect();
        let run_slot = |index: usize| {
            let mut slot = slots[index].lock().unwrap_or_else(PoisonError::into_inner);
            slot.stop_reason = run_device(&mut slot.device, self.kernels[index].as_ref()).err();
        };
        let panicked = || RunError::DeviceThreadPanicked;
        catch_unwind(AssertUnwindSafe(|| threads.broadcast(|thread| run_slot(thread.index()))))
            .map_err(|_| panicked())?;
        let outcomes = slots.into_iter().map(|slot| {
            let DeviceSlot { device, stop_reason } = slot.into_inner().map_err(|_| panicked())?;
            Ok(outcome(device, stop_reason))
        });
        outcomes.collect()
    }
}

/// A device during a step, which one thread of the pool runs.
struct DeviceSlot<'a> {
    device: CpuDevice<'a>,
    stop_reason: Option<StopReason>,
}

fn run_device(device: &mut CpuDevice<'_>, pool: Option<&ThreadPool>) -> Result<(), StopReason> {
    // Also a panic must end the waiting of the other devices.
    let guard = AbortOnDrop(&device.links.abort);
    let result = match pool {
        Some(pool) => pool.install(|| execute::run_step(device)),
        None => execute::run_step(device),
    };
    if result.is_ok() {
        std::mem::forget(guard);
    }
    result
}

fn outcome<'a>(device: CpuDevice<'a>, stop_reason: Option<StopReason>) -> DeviceOutcome<'a> {
    let step = DeviceStep {
        coordinates: device.coordinates,
        loss: device.loss,
        gradient_square_sum: execute::gradient_square_sum(&device),
        report: device.report,
    };
    DeviceOutcome { stop_reason, step }
}

struct AbortOnDrop<'a>(&'a AbortFlag);

impl Drop for AbortOnDrop<'_> {
    fn drop(&mut self) {
        self.0.raise();
    }
}
