//! The end of a step, or why there is none.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use cudarc::driver::DriverError;
use narrows_plan::program::Phase;

use super::{DeviceStepResult, GraphExecutor, StepProgress};
use crate::device::laps::InstructionTimers;
use crate::error::CudaError;
use crate::tape::{GraphNode, NcclCollective, NodeWork, ScheduleItem, SchedulePass, StreamId};
use narrows_runtime::RunError;

/// Lines that are said of a step that stalls.
const LINES_OF_STALL: usize = 8;

/// How often it is looked whether a step is over: it takes milliseconds at least.
const LOOKED_EVERY: Duration = Duration::from_micros(50);

/// Legs that the processor may be ahead of the device.
const LEGS_AHEAD: usize = 8;

/// How often it is looked whether the device goes on and the others are there.
const ASKED_EVERY: Duration = Duration::from_millis(20);

impl GraphExecutor {
    /// Waits for the end of a step that is on the streams.
    pub(super) fn wait(&mut self) -> Result<DeviceStepResult, RunError> {
        self.until(|player| player.ended.try_is_complete())?;
        if let Some(laps) = &mut self.laps {
            self.gpu.said("timing", laps.read())?;
        }
        let answers = self.answers.bytes();
        let mut loss = [0; 8];
        let mut squares = [0; 4];
        loss.copy_from_slice(&answers[..8]);
        squares.copy_from_slice(&answers[8..12]);
        Ok(DeviceStepResult {
            loss: f64::from_le_bytes(loss),
            squares: f32::from_le_bytes(squares),
            time: self.began.at.elapsed(),
        })
    }

    /// Waits until the device is no more than some legs behind, before the leg of this number is put on
    /// its streams. They take a limited number of launches, then whoever puts one there waits, and does not
    /// see that another process is gone.
    pub(super) fn stay_near(&mut self, leg: usize) -> Result<(), RunError> {
        match leg.checked_sub(LEGS_AHEAD) {
            Some(behind) => self.until(|player| player.legs[behind].try_is_complete()),
            None => Ok(()),
        }
    }

    /// The same between instructions that are started one by one.
    pub(super) fn keep_pace(&mut self) -> Result<(), RunError> {
        let now = self.began.paced % 2;
        if self.began.paced > 0 {
            self.until(|player| player.paces[1 - now].try_is_complete())?;
        }
        let recorded = self.paces[now].record(self.compute());
        self.gpu.said("keeping the pace", recorded)?;
        self.began.paced += 1;
        Ok(())
    }

    /// Waits for something, and looks meanwhile whether the device goes on and the others are there.
    fn until(
        &mut self,
        over: impl Fn(&GraphExecutor) -> Result<bool, DriverError>,
    ) -> Result<(), RunError> {
        let mut asked = Instant::now();
        let every = ASKED_EVERY.min(self.stage.deadline);
        while !self.gpu.said("a step", over(self))? {
            if asked.elapsed() > every {
                asked = Instant::now();
                self.all_is_well()?;
            }
            std::thread::sleep(LOOKED_EVERY);
        }
        Ok(())
    }

    fn all_is_well(&mut self) -> Result<(), RunError> {
        // Those of legs that are not queued yet are the step's before.
        let queued = self.legs.iter().take(self.began.queued);
        let over = queued.take_while(|event| event.try_is_complete().unwrap_or(false)).count();
        if over > self.began.over {
            (self.began.over, self.began.advanced) = (over, Instant::now());
        }
        let StepProgress { number, advanced, .. } = self.began;
        if let Some((cluster, communicators)) = &self.stage.others {
            if let Some(mut failure) = communicators.failure() {
                if let CudaError::Nccl { recent, .. } = &mut failure {
                    *recent = self.recent();
                }
                return Err(failure.into());
            }
            if let Some(gone) = cluster.failure(&format!("step {number}")) {
                return Err(gone.into());
            }
        }
        let waited = advanced.elapsed();
        if waited > self.stage.deadline {
            let stalled = CudaError::Stalled {
                ordinal: self.gpu.ordinal,
                step: number,
                waited_s: waited.as_secs_f64(),
                recent: self.recent(),
            };
            return Err(stalled.into());
        }
        Ok(())
    }

    /// The last legs that are over and the first that is not, each on a line of its own; and where instructions
    /// are timed, so that it is known of each, the last collectives.
    fn recent(&self) -> String {
        let joints = match &self.laps {
            Some(laps) => self.recent_joints(laps),
            None => "\n  (try: --eager, which tells single collectives apart)".into(),
        };
        self.recent_legs() + &joints
    }

    fn recent_joints(&self, laps: &InstructionTimers) -> String {
        let mut lines = VecDeque::new();
        for ([piece, entry], over) in laps.entries(StreamId::Collectives) {
            let entry = &self.tape.pieces[piece].entries[entry];
            let NodeWork::Joint(joint) = &entry.work else { continue };
            let state = if over { "over" } else { "not over" };
            if lines.len() == LINES_OF_STALL {
                lines.pop_front();
            }
            lines.push_back(format!("\n  {state}: {}", describe_joint(entry, joint)));
            if !over {
                break;
            }
        }
        lines.into_iter().collect()
    }

    fn recent_legs(&self) -> String {
        let turns = self.tape.turns.iter();
        let legs = turns.flat_map(|turn| turn.legs.iter().map(move |leg| (turn, leg)));
        let mut lines = VecDeque::new();
        for ((turn, leg), event) in legs.zip(&self.legs).take(self.began.queued) {
            let over = event.try_is_complete().unwrap_or(false);
            let state = if over { "over" } else { "not over" };
            if lines.len() == LINES_OF_STALL {
                lines.pop_front();
            }
            lines.push_back(format!("\n  {state}: {}", self.describe(turn, leg)));
            if !over {
                break;
            }
        }
        lines.into_iter().collect()
    }

    fn describe(&self, turn: &SchedulePass, leg: &ScheduleItem) -> String {
        let turn = match turn.phase {
            Phase::Step => "the step phase".into(),
            phase => format!("{phase:?} of microbatch {}", turn.microbatch).to_lowercase(),
        };
        match leg {
            ScheduleItem::Transfer(transfer) => {
                let (name, origin) = (transfer.name(), &transfer.origin);
                format!("{turn}: {name} of {} bytes ({origin})", transfer.bytes())
            }
            ScheduleItem::Piece(piece) => {
                let entries = &self.tape.pieces[*piece].entries;
                let joints = entries.iter().filter_map(|entry| match &entry.work {
                    NodeWork::Joint(joint) => Some((entry, joint)),
                    _ => None,
                });
                let count = joints.clone().count();
                let ends = joints.clone().take(1).chain(joints.skip(1).last());
                let ends: Vec<String> =
                    ends.map(|(entry, joint)| describe_joint(entry, joint)).collect();
                let joints = match count {
                    0 => "no collectives".into(),
                    _ => format!("{count} collectives, {}", ends.join(" to ")),
                };
                format!("{turn}: {} instructions, {joints}", entries.len())
            }
        }
    }
}

fn describe_joint(entry: &GraphNode, joint: &NcclCollective) -> String {
    let (kind, axis) = (joint.kind.name(), joint.sharing.axis.name());
    format!("{kind} over {axis} of {} bytes ({})", joint.whole_bytes(), entry.origin)
}
