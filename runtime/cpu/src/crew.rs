//! The threads of a session's devices. They live as long as it does: what a thread holds for itself,
//! as the products do to pack in, is there in the next step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use super::device::{CpuDevice, Stop};
use super::execute;
use super::links::DeviceLinks;
use narrows_runtime::RunError;
use narrows_runtime::session::DeviceStep;

/// The threads of all devices.
pub struct DeviceThreads {
    /// One for each device; a device alone runs on the thread that wants the step.
    devices: Option<ThreadPool>,
    /// Those that a device divides its kernels among, if it does.
    kernels: Vec<Option<ThreadPool>>,
}

/// What is left of a device when its step is over.
pub struct DeviceOutcome<'a> {
    pub stopped: Option<Stop>,
    pub left: DeviceStep<'a>,
}

impl DeviceOutcome<'_> {
    /// What went wrong on the device itself.
    pub fn take_failure(&mut self) -> Option<RunError> {
        match self.stopped.take() {
            Some(Stop::Failed(error)) => Some(*error),
            other => {
                self.stopped = other;
                None
            }
        }
    }
}

impl DeviceThreads {
    /// For so many devices, each of which uses `threads` threads.
    pub fn new(devices: usize, threads: usize) -> Result<DeviceThreads, ThreadPoolBuildError> {
        let pool = |threads: usize| ThreadPoolBuilder::new().num_threads(threads).build();
        let some = |threads: usize| (threads > 1).then(|| pool(threads)).transpose();
        let kernels = (0..devices).map(|_| some(threads)).collect::<Result<_, _>>()?;
        Ok(DeviceThreads { devices: some(devices)?, kernels })
    }

    /// Runs all devices for a step, at the same time: they wait for each other.
    pub fn run<'a>(&self, devices: Vec<CpuDevice<'a>>) -> Result<Vec<DeviceOutcome<'a>>, RunError> {
        let Some(threads) = &self.devices else {
            let pools = devices.into_iter().zip(&self.kernels);
            return Ok(pools.map(|(device, pool)| run_device(device, pool.as_ref())).collect());
        };
        let seats: Vec<Mutex<DeviceSlot>> =
            devices.into_iter().map(|device| Mutex::new(DeviceSlot::Waits(device))).collect();
        let sit = |number: usize| {
            let mut seat = seats[number].lock().unwrap_or_else(PoisonError::into_inner);
            if let DeviceSlot::Waits(device) = std::mem::replace(&mut *seat, DeviceSlot::Empty) {
                *seat = DeviceSlot::Done(run_device(device, self.kernels[number].as_ref()));
            }
        };
        let broken = || RunError::DeviceThreads { reason: "a device's thread panicked".into() };
        catch_unwind(AssertUnwindSafe(|| threads.broadcast(|thread| sit(thread.index()))))
            .map_err(|_| broken())?;
        let outcome = |seat: Mutex<DeviceSlot<'a>>| match seat.into_inner() {
            Ok(DeviceSlot::Done(outcome)) => Ok(outcome),
            _ => Err(broken()),
        };
        seats.into_iter().map(outcome).collect()
    }
}

/// Where a device is before its step, and what came of it after.
#[allow(clippy::large_enum_variant, reason = "as many as devices, for a step")]
enum DeviceSlot<'a> {
    Waits(CpuDevice<'a>),
    Done(DeviceOutcome<'a>),
    Empty,
}

fn run_device<'a>(mut device: CpuDevice<'a>, pool: Option<&ThreadPool>) -> DeviceOutcome<'a> {
    let links = device.links;
    // A panic would leave the others waiting.
    let guard = AbortOnDrop(links);
    let done = match pool {
        Some(pool) => pool.install(|| device.run()),
        None => device.run(),
    };
    if done.is_ok() {
        std::mem::forget(guard);
    }
    let squares = execute::step::square_sum_of(&device);
    let left = DeviceStep {
        coordinates: device.at,
        loss: device.loss,
        gradient_square_sum: squares,
        report: device.report,
    };
    DeviceOutcome { stopped: done.err(), left }
}

struct AbortOnDrop<'a>(&'a DeviceLinks);

impl Drop for AbortOnDrop<'_> {
    fn drop(&mut self) {
        self.0.abort.raise();
    }
}
