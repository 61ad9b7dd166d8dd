//! What is asked of the planner.

use std::time::Duration;

use narrows_cost_model::{Executor, Profile};
use narrows_plan::graph::Grouping;
use narrows_plan::model::Model;
use narrows_plan::strategy::{Rules, Zero};
use narrows_plan::{Bytes, Defect, Defects};

/// Everything the search depends on. What is `None` is searched.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to train.
    pub model: Model,
    /// On what.
    pub profile: Profile,
    /// How many devices.
    pub devices: u64,
    /// Sequences in a step.
    pub global_batch: u64,
    /// Tokens in a sequence.
    pub sequence_length: u64,
    /// Sequences a replica processes at a time.
    pub micro_batch: Option<u64>,
    /// Devices along the tensor axis.
    pub tensor: Option<u64>,
    /// Pipeline stages.
    pub pipeline: Option<u64>,
    /// Replicas.
    pub data: Option<u64>,
    /// Optimizer sharding.
    pub zero: Option<Zero>,
    /// Restrictions of the strategies.
    pub rules: Rules,
    /// Which groupings are searched.
    pub grouping: GroupingRule,
    /// What a device may hold.
    pub memory_limit: MemoryLimit,
    /// How kernels are launched.
    pub executor: Executor,
    /// When to stop searching.
    pub time_limit: Option<Duration>,
}

/// Which groupings are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupingRule {
    /// All of them.
    Auto,
    /// Everything that can be grouped is.
    On,
    /// Nothing is.
    Off,
}

/// What a device may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The profile's memory less its reserve.
    Auto,
    /// No limit.
    None,
    /// So many bytes for the arena.
    Bytes(Bytes),
}

impl GroupingRule {
    /// The groupings to try.
    pub fn groupings(self) -> &'static [Grouping] {
        match self {
            GroupingRule::Auto => &Grouping::ALL,
            GroupingRule::On => &Grouping::ALL[..1],
            GroupingRule::Off => &Grouping::ALL[3..],
        }
    }
}

impl Request {
    /// The whole space on these devices: everything that can be searched is, memory as the profile
    /// says, kernels captured, no time limit.
    pub fn new(
        model: Model,
        profile: Profile,
        devices: u64,
        global_batch: u64,
        sequence_length: u64,
    ) -> Request {
        Request {
            model,
            profile,
            devices,
            global_batch,
            sequence_length,
            micro_batch: None,
            tensor: None,
            pipeline: None,
            data: None,
            zero: None,
            rules: Rules::ALL,
            grouping: GroupingRule::Auto,
            memory_limit: MemoryLimit::Auto,
            executor: Executor::Captured,
            time_limit: None,
        }
    }

    /// The bytes an arena may have.
    pub fn memory_bytes(&self) -> Bytes {
        match self.memory_limit {
            MemoryLimit::Auto => self.profile.usable_memory(),
            MemoryLimit::None => Bytes(u64::MAX),
            MemoryLimit::Bytes(bytes) => bytes,
        }
    }

    /// Whether the sizes make sense together; every defect names the flag it belongs to.
    pub fn validate(&self) -> Result<(), Defects> {
        let mut defects = Defects::default();
        let sizes = [
            ("devices", Some(self.devices), 1 << 20),
            ("global-batch", Some(self.global_batch), 1 << 24),
            ("sequence-length", Some(self.sequence_length), 1 << 24),
            ("micro-batch", self.micro_batch, 1 << 24),
            ("tensor", self.tensor, 1 << 20),
            ("pipeline", self.pipeline, 1 << 20),
            ("data-parallel", self.data, 1 << 20),
        ];
        for (flag, size, most) in sizes {
            if let Some(size) = size
                && (size == 0 || size > most)
            {
                defects.push(Defect::new(flag, format!("{size} is not between 1 and {most}")));
            }
        }
        if self.sequence_length > self.model.max_sequence_length {
            let problem = format!(
                "{} tokens are more than the {} that `{}` is made for",
                self.sequence_length, self.model.max_sequence_length, self.model.name
            );
            let hint = "a shorter sequence, or a larger max_position_embeddings in the model";
            defects.push(Defect::new("sequence-length", problem).hint(hint));
        }
        let blocks = self.model.blocks.len() as u64;
        if let Some(stages) = self.pipeline.filter(|stages| *stages > blocks) {
            let problem =
                format!("{stages} stages are more than the {blocks} blocks to put on them");
            defects.push(Defect::new("pipeline", problem).hint("at most one stage a block"));
        }
        let fixed = [self.tensor, self.pipeline, self.data].into_iter().flatten();
        let product = fixed.fold(1_u64, |product, size| product.saturating_mul(size));
        if defects.0.is_empty() && !self.devices.is_multiple_of(product) {
            let problem = format!(
                "{} devices do not divide into the {product} that the fixed axes need",
                self.devices
            );
            let hint = "axes whose product divides the number of devices";
            defects.push(Defect::new("devices", problem).hint(hint));
        }
        defects.into_result(())
    }
}
