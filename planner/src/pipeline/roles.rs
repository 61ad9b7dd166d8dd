//! Parts that stages contribute to paths of passes that a step of a pipeline waits for.

/// Collectives over the data axis that take longer than the pass that they overlap with: gathers of updated weights during the
/// first forward pass, or gradient reductions during the last pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Longer {
    pub gathers: bool,
    pub reductions: bool,
}

/// All cases.
pub(super) const CASES: [Longer; 4] = [
    Longer { gathers: false, reductions: false },
    Longer { gathers: false, reductions: true },
    Longer { gathers: true, reductions: false },
    Longer { gathers: true, reductions: true },
];

/// Gathers of updated weights during the first forward pass of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForwardGathers {
    /// They may be hidden while the stage waits for its first microbatch.
    Uncounted,
    /// They take no longer than the pass.
    Hidden,
    /// They take longer than the pass.
    Longer,
}

/// Part of a path that a stage contributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// First forward pass with its gathers, less the gathers of a later stage that it hides.
    Forward(ForwardGathers),
    /// Both passes of one microbatch.
    Passes,
    /// Both passes without the weight gradients that have passes of their own.
    RoundTrip,
    /// Both passes of one microbatch on the stage where a step ends, and the step phase, in a case.
    LastReturn(usize),
    /// The same where the last pass is one of weight gradients, and reductions take longer.
    LastReturnWithWeightGradients,
    /// The same of all microbatches after the warm-up.
    AfterWarmUp(usize),
    /// All passes of a step and the step phase, in a case.
    Step(usize),
    /// The same where the last pass is one of weight gradients, and reductions take longer.
    StepWithWeightGradients,
    /// A step of a zero-bubble pipeline as in one of these three roles, but for all forward passes after the first that the
    /// second stage runs before its first backward pass.
    Waited(Ending),
}

/// The end of a step of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Collectives over the data axis are hidden.
    Hidden,
    /// Reductions take longer than the last backward pass.
    Reductions,
    /// Reductions take longer than the last pass, one of weight gradients.
    WithWeightGradients,
}

impl Ending {
    /// The role of a step with this end.
    pub(super) fn step(self) -> Role {
        match self {
            Ending::Hidden => Role::Step(0),
            Ending::Reductions => Role::Step(1),
            Ending::WithWeightGradients => Role::StepWithWeightGradients,
        }
    }

    /// The role of the last return with this end.
    pub(super) fn last_return(self) -> Role {
        match self {
            Ending::Hidden => Role::LastReturn(0),
            Ending::Reductions => Role::LastReturn(1),
            Ending::WithWeightGradients => Role::LastReturnWithWeightGradients,
        }
    }
}

/// All roles, each at its [index](Role::index).
pub(super) const ROLES: [Role; 22] = [
    Role::Forward(ForwardGathers::Uncounted),
    Role::Forward(ForwardGathers::Hidden),
    Role::Forward(ForwardGathers::Longer),
    Role::Passes,
    Role::RoundTrip,
    Role::LastReturn(0),
    Role::LastReturn(1),
    Role::LastReturn(2),
    Role::LastReturn(3),
    Role::LastReturnWithWeightGradients,
    Role::AfterWarmUp(0),
    Role::AfterWarmUp(1),
    Role::AfterWarmUp(2),
    Role::AfterWarmUp(3),
    Role::Step(0),
    Role::Step(1),
    Role::Step(2),
    Role::Step(3),
    Role::StepWithWeightGradients,
    Role::Waited(Ending::Hidden),
    Role::Waited(Ending::Reductions),
    Role::Waited(Ending::WithWeightGradients),
];

impl Role {
    /// The place in [`ROLES`].
    pub(super) fn index(self) -> usize {
        match self {
            Role::Forward(gathers) => gathers as usize,
            Role::Passes => 3,
            Role::RoundTrip => 4,
            Role::LastReturn(case) => 5 + case,
            Role::LastReturnWithWeightGradients => 9,
            Role::AfterWarmUp(case) => 10 + case,
            Role::Step(case) => 14 + case,
            Role::StepWithWeightGradients => 18,
            Role::Waited(ending) => 19 + ending as usize,
        }
    }
}
