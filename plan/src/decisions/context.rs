//! The context of a plan file, whose sizes are checked.

use crate::context::{Context, ContextAttention, Zero};
use crate::{Defect, Defects};

use super::Plan;

impl Plan {
    /// Neighbouring replicas that together hold one copy of the states that ZeRO shards.
    fn shard_size(&self) -> u64 {
        match self.zero {
            Zero::Off => 1,
            _ => self.shard_size.unwrap_or(self.mesh.replicas()),
        }
    }

    /// Chunks of each pipeline stage: as many as the listed stages are of the mesh's, with an interleaved schedule.
    pub fn chunks(&self) -> u64 {
        match self.schedule.has_chunks() {
            true => self.stages.len() as u64 / self.mesh.pipeline.max(1),
            false => 1,
        }
    }

    /// An interleaved schedule without several stages of several chunks, or with microbatches that do not divide.
    fn interleaving_defects(&self, microbatches: u64) -> Vec<Defect> {
        let stages = self.mesh.pipeline;
        if !self.schedule.has_chunks() {
            return vec![];
        }
        let mut defects = vec![];
        if stages == 1 {
            let problem = "is interleaved, but the mesh has one stage";
            defects.push(Defect::new("schedule", problem).hint("1f1b"));
        } else if self.chunks() < 2 || !(self.stages.len() as u64).is_multiple_of(stages) {
            let problem = format!(
                "{} entries are listed, but an interleaved schedule has one for each of several model chunks on {stages} \
                 pipeline stages",
                self.stages.len()
            );
            let hint =
                format!("{} entries for 2 chunks per stage, or the schedule 1f1b", 2 * stages);
            defects.push(Defect::new("stages", problem).hint(hint));
        }
        if !microbatches.is_multiple_of(stages) {
            let problem = format!(
                "is interleaved, which needs a multiple of {stages} microbatches, one for each pipeline stage; a step has \
                 {microbatches}"
            );
            let hint = "1f1b, or another global batch or microbatch size";
            defects.push(Defect::new("schedule", problem).hint(hint));
        }
        defects
    }

    /// Microbatches in pairs where there is nothing to overlap, where they do not divide, or with other overlap of passes.
    fn pair_defects(&self, microbatches: u64) -> Vec<Defect> {
        if !self.overlap_microbatch_pairs {
            return vec![];
        }
        let mut defects = vec![];
        let mut defect = |problem: String, hint: &str| {
            defects.push(Defect::new("overlap_microbatch_pairs", problem).hint(hint));
        };
        let omit = "omit `overlap_microbatch_pairs`";
        if self.mesh.tensor == 1 && self.mesh.context == 1 {
            let problem = "is set, but without a tensor or a context axis passes have no collectives to overlap";
            defect(problem.into(), omit);
        }
        if self.mesh.context > 1 && self.context_attention == ContextAttention::Ring {
            let problem = "is set together with the context_attention `ring`, whose transfers overlap with attention to \
                           the keys before";
            defect(problem.into(), "exchange or gather, or no pairs");
        }
        let multiple = self.schedule.paired_microbatch_multiple(self.mesh.pipeline);
        if !microbatches.is_multiple_of(multiple) {
            let problem = format!(
                "needs a multiple of {multiple} microbatches on each replica; a step has {microbatches}"
            );
            defect(problem, "another global batch or microbatch size");
        }
        if self.overlap_tensor_collectives {
            let problem = "is set together with `overlap_tensor_collectives`: a collective overlaps with the other \
                           microbatch or with a weight-gradient GEMM";
            defect(problem.into(), "one of the two");
        }
        if self.zero >= Zero::Two && self.shard_size() > 1 {
            let problem = format!(
                "is set together with ZeRO-{}, whose passes have collectives over the data axis",
                self.zero.stage()
            );
            defect(problem, "the ZeRO stage one, or no pairs");
        }
        defects
    }

    /// Sizes of the mesh and the workload that are out of range.
    fn size_defects(&self) -> Defects {
        let sizes = [
            ("mesh.tensor", self.mesh.tensor),
            ("mesh.pipeline", self.mesh.pipeline),
            ("mesh.data", self.mesh.data),
            ("mesh.context", self.mesh.context),
            ("workload.global_batch", self.workload.global_batch),
            ("workload.sequence_length", self.workload.sequence_length),
            ("workload.micro_batch", self.workload.micro_batch),
        ];
        let mut defects = Defects::default();
        for (field, size) in sizes {
            if size == 0 || size > 1 << 24 {
                defects.push(Defect::new(field, format!("{size} is not between 1 and 16777216")));
            }
        }
        defects
    }

    /// The context of the plan.
    ///
    /// # Errors
    /// Sizes out of range, or a global batch that does not divide into microbatches.
    pub fn context(&self) -> Result<Context, Defects> {
        self.size_defects().into_result(())?;
        let mut defects = Defects::default();
        if let Some(problem) = self.workload.indivisible_batch(&self.mesh) {
            let sequences = self.mesh.data * self.workload.micro_batch;
            let hint = format!("a multiple of {sequences}, or another microbatch or data axis");
            defects.push(Defect::new("workload.global_batch", problem).hint(hint));
        }
        let length = self.workload.sequence_length;
        if !self.context_attention.divides_positions(&self.mesh, length) {
            let chunks = match self.context_attention {
                ContextAttention::Exchange => "evenly",
                ContextAttention::Gather | ContextAttention::Ring => "into two equal chunks each",
            };
            let problem = format!(
                "{} devices do not divide the {length} positions of a sequence {chunks}",
                self.mesh.context
            );
            defects.push(Defect::new("mesh.context", problem));
        }
        if self.mesh.context == 1 && self.context_attention != ContextAttention::Exchange {
            let problem = "is set, but the mesh has no context axis";
            defects
                .push(Defect::new("context_attention", problem).hint("omit `context_attention`"));
        }
        if defects.0.is_empty() {
            let microbatches = self.workload.microbatches(&self.mesh);
            self.interleaving_defects(microbatches).into_iter().for_each(|d| defects.push(d));
            self.pair_defects(microbatches).into_iter().for_each(|d| defects.push(d));
        }
        if defects.0.is_empty() && !self.mesh.replicas().is_multiple_of(self.shard_size()) {
            let problem = format!(
                "{} replicas do not divide into groups of {}",
                self.mesh.replicas(),
                self.shard_size()
            );
            let hint = "a divisor of mesh.data, times mesh.context";
            defects.push(Defect::new("shard_size", problem).hint(hint));
        }
        if self.shard_size == Some(1) {
            let defect = Defect::new("shard_size", "a shard group needs at least two replicas");
            defects.push(defect.hint("at least 2, or leave it out"));
        }
        if self.zero == Zero::Off && self.shard_size.is_some() {
            let problem = "is set, but without ZeRO nothing is sharded over replicas";
            defects.push(Defect::new("shard_size", problem).hint("omit `shard_size`"));
        }
        if !self.grad_reduce_dtype.suits(self.precision) {
            let problem = "`bf16` needs mixed precision, but weights and activations are fp32";
            let hint = "fp32, or the precision mixed-bf16";
            defects.push(Defect::new("grad_reduce_dtype", problem).hint(hint));
        }
        let context = Context {
            context_attention: self.context_attention,
            grad_reduce_dtype: self.grad_reduce_dtype,
            shard_size: self.shard_size(),
            schedule: self.schedule,
            chunks: self.chunks(),
            overlap_grad_reduce: self.overlap_grad_reduce,
            overlap_param_gather: self.overlap_param_gather,
            overlap_tensor_collectives: self.overlap_tensor_collectives,
            overlap_microbatch_pairs: self.overlap_microbatch_pairs,
            last_gradient_bucket: self.last_gradient_bucket,
            first_gather_bucket: self.first_gather_bucket,
            loro_every: self.loro_every,
            ..Context::new(self.mesh, self.workload, self.precision, self.zero)
        };
        defects.into_result(context)
    }
}
