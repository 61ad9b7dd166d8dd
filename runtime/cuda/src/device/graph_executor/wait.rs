//! Waiting for the GPU, and diagnosis of steps that make no progress.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::DriverError;
use narrows_plan::kernel::Collective;
use narrows_plan::program::MicrobatchPass;
use narrows_runtime::RunError;

use super::executor::{DeviceStepResult, GraphExecutor};
use crate::device::timers::InstructionTimers;
use crate::error::CudaError;
use crate::schedule::{GraphNode, ScheduleItem, StreamId};

/// Lines of a diagnosis for each stream of items or collectives.
const ACTIVITY_LINES_MAX: usize = 8;

/// Interval at which an event is polled; a step takes milliseconds at least.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Interval at which progress and the other processes are checked.
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_millis(20);

impl GraphExecutor {
    /// Waits for the end of an enqueued step and reads its results.
    pub(super) fn wait_for_step(&mut self) -> Result<DeviceStepResult, RunError> {
        self.poll_until(|executor| executor.step_end.try_is_complete())?;
        if let Some(timers) = &mut self.timers {
            self.gpu.check("timing", timers.read())?;
        }
        let results = self.results.bytes();
        let mut loss = [0; 8];
        let mut squares = [0; 4];
        loss.copy_from_slice(&results[..8]);
        squares.copy_from_slice(&results[8..12]);
        Ok(DeviceStepResult {
            loss: f64::from_le_bytes(loss),
            gradient_square_sum: f32::from_le_bytes(squares),
            time: self.progress.started.elapsed(),
        })
    }

    /// Waits until the GPU is at most a few items behind the item of this index, which is enqueued next; the collectives of
    /// buckets may be further behind. Streams hold a limited number of launches: beyond it, enqueuing would block, and
    /// failures of other processes would go unnoticed.
    pub(super) fn limit_queued_items(&mut self, item: usize) -> Result<(), RunError> {
        match self.awaited_items[item] {
            Some(earlier) => {
                self.poll_until(|executor| executor.item_events[earlier].try_is_complete())
            }
            None => Ok(()),
        }
    }

    /// The same limit between instructions that are enqueued one by one.
    pub(super) fn limit_queued_nodes(&mut self) -> Result<(), RunError> {
        let next = self.progress.throttle_count % 2;
        if self.progress.throttle_count > 0 {
            self.poll_until(|executor| executor.throttle_events[1 - next].try_is_complete())?;
        }
        let recorded = self.throttle_events[next].record(self.compute_stream());
        self.gpu.check("limiting the queue", recorded)?;
        self.progress.throttle_count += 1;
        Ok(())
    }

    /// Polls a condition, and meanwhile checks progress and the other processes.
    fn poll_until(
        &mut self,
        done: impl Fn(&GraphExecutor) -> Result<bool, DriverError>,
    ) -> Result<(), RunError> {
        let mut last_check = Instant::now();
        let interval = HEALTH_CHECK_INTERVAL.min(self.resources.timeout);
        while !self.gpu.check("a step", done(self))? {
            if last_check.elapsed() > interval {
                last_check = Instant::now();
                self.check_health()?;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until all gathers of updated weights have ended, and meanwhile checks the other processes.
    ///
    /// # Errors
    /// When the GPU, NCCL or another process fails, or the gathers do not end before the timeout. The executor cannot be
    /// used afterwards.
    pub fn wait_for_gathers(&self) -> Result<(), RunError> {
        let Some(last) = self.gathers.last() else { return Ok(()) };
        let gpu = &self.gpu;
        let wait = || {
            gpu.check("its context", gpu.context.bind_to_thread())?;
            let began = Instant::now();
            let mut last_check = began;
            while !gpu.check("gathering weights", last.try_is_complete())? {
                if last_check.elapsed() > HEALTH_CHECK_INTERVAL {
                    last_check = Instant::now();
                    self.check_peers()?;
                    self.check_timeout(began.elapsed())?;
                }
                std::thread::sleep(POLL_INTERVAL);
            }
            Ok(())
        };
        let result: Result<(), RunError> = wait();
        gpu.abandoned.fetch_or(result.is_err(), Ordering::Relaxed);
        result
    }

    fn check_health(&mut self) -> Result<(), RunError> {
        // Events of items that are not enqueued yet are still those of the previous step.
        let queued = self.item_events.iter().take(self.progress.queued);
        let completed = queued.filter(|event| event.try_is_complete().unwrap_or(false)).count();
        if completed > self.progress.completed {
            (self.progress.completed, self.progress.last_advance) = (completed, Instant::now());
        }
        self.check_peers()?;
        self.check_timeout(self.progress.last_advance.elapsed())
    }

    /// Checks NCCL and the other processes.
    fn check_peers(&self) -> Result<(), RunError> {
        let Some((processes, communicators)) = &self.resources.peers else { return Ok(()) };
        if let Some(mut failure) = communicators.async_error() {
            if let CudaError::Nccl { recent_activity, .. } = &mut failure {
                *recent_activity = self.recent_activity();
            }
            return Err(failure.into());
        }
        match processes.failure(&format!("step {}", self.progress.step)) {
            Some(failure) => Err(failure.into()),
            None => Ok(()),
        }
    }

    /// Fails where the GPU has made no progress for longer than the timeout.
    fn check_timeout(&self, waited: Duration) -> Result<(), RunError> {
        if waited <= self.resources.timeout {
            return Ok(());
        }
        let stalled = CudaError::Stalled {
            ordinal: self.gpu.ordinal,
            step: self.progress.step,
            waited_s: waited.as_secs_f64(),
            eager: self.timers.is_some(),
            recent_activity: self.recent_activity(),
        };
        Err(stalled.into())
    }

    /// The last items that have ended and the first that has not. Where instructions are timed, which makes their
    /// state known, also the last collectives.
    fn recent_activity(&self) -> Vec<String> {
        let mut activity = self.recent_items();
        activity.extend(self.timers.iter().flat_map(|timers| self.recent_collectives(timers)));
        activity
    }

    fn recent_collectives(&self, timers: &InstructionTimers) -> Vec<String> {
        let of_stream = |stream: StreamId| {
            activity_lines(timers.nodes(stream).filter_map(|(timed, ended)| {
                let node = &self.schedule.segments[timed.segment].nodes[timed.index];
                Some((describe_collective(node, &node.work.collective()?), ended))
            }))
        };
        StreamId::OF_COLLECTIVES.into_iter().flat_map(of_stream).collect()
    }

    fn recent_items(&self) -> Vec<String> {
        let passes = self.schedule.passes.iter();
        let items = passes.flat_map(|pass| pass.items.iter().map(move |item| (pass.pass, item)));
        let items = items.zip(&self.item_events).take(self.progress.queued);
        // The collectives of buckets end in an order of their own.
        let lines = |of_buckets: bool| {
            let own = items.clone().filter(|((_, item), _)| item.is_bucket() == of_buckets);
            activity_lines(own.map(|((pass, item), event)| {
                (self.describe_item(pass, item), event.try_is_complete().unwrap_or(false))
            }))
        };
        [lines(false), lines(true)].concat()
    }

    fn describe_item(&self, pass: MicrobatchPass, item: &ScheduleItem) -> String {
        match item {
            ScheduleItem::Transfer(transfer) => {
                let (name, origin) = (transfer.name(), &transfer.origin);
                format!("{pass}: {name} of {} bytes ({origin})", transfer.bytes())
            }
            ScheduleItem::AwaitGathers(_) => format!("{pass}: waits for gathered weights"),
            ScheduleItem::Segment(segment)
            | ScheduleItem::Reductions(segment)
            | ScheduleItem::Gathers { segment, .. } => {
                let segment = &self.schedule.segments[*segment];
                let collectives: Vec<String> = segment
                    .nodes
                    .iter()
                    .filter_map(|node| Some(describe_collective(node, &node.work.collective()?)))
                    .collect();
                let collectives = match &collectives[..] {
                    [] => "no collectives".into(),
                    [only] => format!("1 collective, {only}"),
                    [first, .., last] => {
                        format!("{} collectives, {first} to {last}", collectives.len())
                    }
                };
                format!("{pass}: {} instructions, {collectives}", segment.instructions())
            }
        }
    }
}

/// The last lines up to the first activity that has not ended.
fn activity_lines(activities: impl Iterator<Item = (String, bool)>) -> Vec<String> {
    let mut lines = VecDeque::new();
    for (activity, ended) in activities {
        let state = if ended { "ended" } else { "not ended" };
        if lines.len() == ACTIVITY_LINES_MAX {
            lines.pop_front();
        }
        lines.push_back(format!("{state}: {activity}"));
        if !ended {
            break;
        }
    }
    lines.into()
}

fn describe_collective(node: &GraphNode, collective: &Collective) -> String {
    let (kind, axis) = (collective.kind.name(), collective.group.axis.name());
    format!("{kind} over {axis} of {} bytes ({})", collective.payload.0, node.origin)
}
