//! Operations that processes execute together, as frames and messages name them.

use std::fmt;

use narrows_plan::program::{CollectiveFunction, Reduction};

/// An operation of two or more processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WireOp {
    /// A collective.
    Collective(CollectiveFunction),
    /// A shift around a ring.
    Shift,
    /// The sending side of a transfer.
    Send,
    /// The receiving side of a transfer.
    Receive,
    /// Messages of all processes, gathered at rank 0 and answered by it.
    ControlExchange,
    /// Gathering of tensors at rank 0.
    Gather,
}

impl WireOp {
    /// One operation for each code.
    const ALL: [WireOp; 9] = [
        WireOp::Collective(CollectiveFunction::AllReduce(Reduction::Sum)),
        WireOp::Collective(CollectiveFunction::AllReduce(Reduction::Maximum)),
        WireOp::Collective(CollectiveFunction::ReduceScatter),
        WireOp::Collective(CollectiveFunction::AllGather),
        WireOp::Collective(CollectiveFunction::AllToAll),
        WireOp::Send,
        WireOp::ControlExchange,
        WireOp::Gather,
        WireOp::Shift,
    ];

    /// The code in frame headers. A send and its receive have the same.
    pub fn code(self) -> u16 {
        match self {
            WireOp::Collective(CollectiveFunction::AllReduce(Reduction::Sum)) => 0,
            WireOp::Collective(CollectiveFunction::AllReduce(Reduction::Maximum)) => 1,
            WireOp::Collective(CollectiveFunction::ReduceScatter) => 2,
            WireOp::Collective(CollectiveFunction::AllGather) => 3,
            WireOp::Collective(CollectiveFunction::AllToAll) => 4,
            WireOp::Send | WireOp::Receive => 5,
            WireOp::ControlExchange => 7,
            WireOp::Gather => 8,
            WireOp::Shift => 9,
        }
    }

    /// The operation of a code, as its sender sees it; `None` for unknown codes.
    pub fn from_code(code: u16) -> Option<WireOp> {
        WireOp::ALL.into_iter().find(|operation| operation.code() == code)
    }

    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            WireOp::Collective(CollectiveFunction::AllReduce(Reduction::Sum)) => "all-reduce",
            WireOp::Collective(CollectiveFunction::AllReduce(Reduction::Maximum)) => {
                "max all-reduce"
            }
            WireOp::Collective(CollectiveFunction::ReduceScatter) => "reduce-scatter",
            WireOp::Collective(CollectiveFunction::AllGather) => "all-gather",
            WireOp::Collective(CollectiveFunction::AllToAll) => "all-to-all",
            WireOp::Shift => "shift",
            WireOp::Send => "send",
            WireOp::Receive => "receive",
            WireOp::ControlExchange => "control exchange",
            WireOp::Gather => "gather",
        }
    }
}

/// An operation of a channel that this process has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingOp {
    /// The operation.
    pub operation: WireOp,
    /// Name of the channel: the processes that take part.
    pub channel: &'static str,
    /// Number of earlier operations of the channel.
    pub sequence: u64,
    /// Elements of this process's operand.
    pub elements: usize,
}

impl fmt::Display for PendingOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PendingOp { operation, channel, sequence, elements } = self;
        write!(f, "{} {sequence} over {channel} ({elements} elements)", operation.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_decode() {
        for operation in WireOp::ALL {
            assert_eq!(WireOp::from_code(operation.code()), Some(operation));
        }
        assert_eq!(WireOp::from_code(6), None);
    }
}
