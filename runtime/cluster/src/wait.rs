//! How long a process waits for a frame of a peer.
//!
//! When the timeout is over, the process asks the peer what it is doing. A peer that does not answer, or that computes, is
//! late. One that waits for a third process is not: its own timeout will end first, and its report names the process that
//! stalls. One that reads or writes a checkpoint is waited for as long as it says so, and so is one that waits for such a process:
//! it passes the answer on with its age. An answer older than the timeout does not count, since processes that wait for each other
//! could pass it on for ever.

use std::time::{Duration, Instant};

use super::activity::Activity;

/// Time that a peer has to answer. Frames that have arrived meanwhile are read too: a process that was stopped finds its
/// time over before its receiving thread has read them.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Time beyond its own timeout that a process waits for the report of a peer that waits for a third one.
const REPORT_GRACE: Duration = Duration::from_secs(5);

/// Longest time after which a peer that uses storage is asked again.
const STORAGE_INTERVAL: Duration = Duration::from_secs(5);

/// The wait for one frame.
pub(crate) struct Wait {
    start: Instant,
    timeout: Duration,
    deadline: Instant,
    /// Whether the peer has been asked since the last deadline.
    is_asked: bool,
    /// Whether the timeout was extended for a peer that waits itself, since one last used storage. It is extended once: two
    /// that wait for each other would extend it for ever.
    is_prolonged: bool,
}

/// Next action of a waiting process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitStep {
    /// Waiting for a change, no longer than this.
    Sleep(Duration),
    /// Asking the peer for its activity.
    Ask,
    /// The peer is late.
    TimedOut,
}

impl Wait {
    /// A wait that begins now.
    pub fn new(timeout: Duration) -> Wait {
        let start = Instant::now();
        let deadline = start + timeout;
        Wait { start, timeout, deadline, is_asked: false, is_prolonged: false }
    }

    /// Start of the wait.
    pub fn start(&self) -> Instant {
        self.start
    }

    /// Returns the next action. `answer` is an answer of the peer that has just arrived, and `last_receive` the last arrival of
    /// any bytes of its data.
    pub fn next(&mut self, answer: Option<Activity>, last_receive: Instant) -> WaitStep {
        match answer.filter(|_| self.is_asked) {
            None => {}
            Some(Activity::Storage(age)) if age <= self.timeout => {
                self.is_prolonged = false;
                self.prolong(STORAGE_INTERVAL.min(self.timeout / 4));
            }
            Some(Activity::WaitingFor(_) | Activity::Storage(_)) if !self.is_prolonged => {
                self.is_prolonged = true;
                self.prolong(self.timeout + REPORT_GRACE);
            }
            Some(_) => return WaitStep::TimedOut,
        }
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        if !remaining.is_zero() {
            return WaitStep::Sleep(remaining);
        }
        // A long frame is arriving.
        if last_receive.elapsed() < ANSWER_TIMEOUT {
            return WaitStep::Sleep(ANSWER_TIMEOUT);
        }
        if self.is_asked {
            return WaitStep::TimedOut;
        }
        self.deadline = Instant::now() + ANSWER_TIMEOUT;
        self.is_asked = true;
        WaitStep::Ask
    }

    fn prolong(&mut self, time: Duration) {
        self.deadline = Instant::now() + time;
        self.is_asked = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wait whose time is over and whose peer has been asked.
    fn asked() -> (Wait, Instant) {
        let mut wait = Wait::new(Duration::ZERO);
        let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        assert_eq!(wait.next(None, long_ago), WaitStep::Ask);
        wait.timeout = Duration::from_secs(60);
        (wait, long_ago)
    }

    #[test]
    fn only_a_peer_that_waits_or_uses_storage_is_waited_for() {
        let sleeps = |step| matches!(step, WaitStep::Sleep(time) if time > Duration::from_secs(4));
        let (mut wait, silent) = asked();
        assert!(matches!(wait.next(None, silent), WaitStep::Sleep(time) if time <= ANSWER_TIMEOUT));
        assert_eq!(wait.next(Some(Activity::Computing), silent), WaitStep::TimedOut);
        let (mut wait, silent) = asked();
        assert!(sleeps(wait.next(Some(Activity::WaitingFor(3)), silent)));
        // A reply without a request is an old one.
        assert!(sleeps(wait.next(Some(Activity::Computing), silent)));
        let (mut wait, silent) = asked();
        for seconds in [0, 7, 60, 1] {
            let answer = Activity::Storage(Duration::from_secs(seconds));
            assert!(sleeps(wait.next(Some(answer), silent)), "{seconds}");
            wait.deadline = Instant::now();
            assert_eq!(wait.next(None, silent), WaitStep::Ask);
        }
    }

    /// As between two processes that wait for each other, one of which used storage before.
    #[test]
    fn old_answers_are_those_of_a_peer_that_waits() {
        let (mut wait, silent) = asked();
        let old = Some(Activity::Storage(Duration::from_secs(61)));
        assert!(matches!(wait.next(old, silent), WaitStep::Sleep(_)));
        wait.deadline = Instant::now();
        assert_eq!(wait.next(None, silent), WaitStep::Ask);
        assert_eq!(wait.next(old, silent), WaitStep::TimedOut);
    }

    #[test]
    fn a_wait_for_a_peer_that_waits_is_prolonged_once() {
        let (mut wait, silent) = asked();
        assert!(matches!(wait.next(Some(Activity::WaitingFor(0)), silent), WaitStep::Sleep(_)));
        wait.deadline = Instant::now();
        assert_eq!(wait.next(None, silent), WaitStep::Ask);
        assert_eq!(wait.next(Some(Activity::WaitingFor(0)), silent), WaitStep::TimedOut);
    }

    #[test]
    fn an_arriving_frame_prolongs_a_wait() {
        let mut wait = Wait::new(Duration::ZERO);
        assert_eq!(wait.next(None, Instant::now()), WaitStep::Sleep(ANSWER_TIMEOUT));
    }
}
