//! Lowers partitions: first to the arenas of their stages, and where these fit to a checked and simulated plan.

use std::sync::Arc;

use narrows_cost_model::{ExactStepTime, ExactStepWork, simulate};
use narrows_plan::program::Program;
use narrows_plan::{
    Bytes, CheckedProgram, Context, Kernel, Plan, ResolvedPlan, Seconds, lower, lower_within,
};

use super::sized_plan::SizedPlan;
use super::solver::ContextSolver;
use crate::feasible_plan::{FeasiblePlan, ModelDecisions};
use crate::lowered_plans::PlanDigest;
use crate::pipeline::{EmbeddingAndHead, Partition, with_fastest_buckets};
use crate::plan_writer::write_plan;

impl ContextSolver<'_> {
    /// The arenas of a partition.
    pub(super) fn size(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        partition: Partition,
    ) -> SizedPlan {
        self.size_within(context, embedding_and_head, partition, Bytes(u64::MAX))
    }

    /// The arenas of a partition, up to the first stage whose arena has more than `arena_max` bytes.
    pub(super) fn size_within(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        partition: Partition,
        arena_max: Bytes,
    ) -> SizedPlan {
        let overheads = self.overheads(context, embedding_and_head);
        let (context, partition_time) = with_fastest_buckets(context, &partition, &overheads);
        let decisions = ModelDecisions {
            context,
            boundary: embedding_and_head.boundary,
            embedding: embedding_and_head.embedding.clone(),
            stages: partition.virtual_stages(context.chunks as usize),
            head: embedding_and_head.head.clone(),
        };
        let plan = write_plan(self.request, &decisions);
        let digest = PlanDigest::new(&plan);
        let stages = context.mesh.pipeline as usize;
        let is_enough = |arenas: &Arc<[Bytes]>| {
            arenas.len() == stages || arenas.last().is_some_and(|last| *last > arena_max)
        };
        let known = self.segments.lowered().arenas(&digest).filter(is_enough);
        let mut program = None;
        let arenas = known.unwrap_or_else(|| {
            let arenas: Arc<[Bytes]> = match lower_within(&self.resolve(&plan), arena_max) {
                Ok(lowered) => {
                    let arenas = lowered.stages.iter().map(|stage| stage.arena).collect();
                    program = Some(lowered);
                    arenas
                }
                Err(arenas) => arenas.into(),
            };
            self.segments.lowered().insert_arenas(digest, arenas.clone());
            arenas
        });
        let method = partition.stages.iter().map(|stage| stage.method).max().unwrap_or_default();
        let objective = partition.bound;
        SizedPlan { decisions, plan, digest, program, arenas, partition_time, objective, method }
    }

    /// The plan, checked and simulated.
    pub(super) fn complete(&self, sized: SizedPlan) -> FeasiblePlan {
        let SizedPlan { decisions, plan, digest, partition_time, objective, method, .. } = sized;
        let lowered = self.segments.lowered();
        let program = lowered.program(&digest).unwrap_or_else(|| {
            let program = sized.program.unwrap_or_else(|| lower(&self.resolve(&plan)));
            let program = CheckedProgram::check(program).unwrap_or_else(|errors| {
                unreachable!("the planner's own program fails the check: {errors}")
            });
            lowered.insert_program(digest, program.clone());
            program
        });
        let prices = self.segments.prices(&decisions.context);
        let price = |kernel: &Kernel| prices.kernel_time(kernel);
        let time = simulate(&program, prices.streams(&price)).step_time;
        let beyond_kernels = self.beyond_kernels(program.program());
        FeasiblePlan {
            decisions,
            plan,
            program,
            time,
            beyond_kernels,
            partition_time,
            objective,
            method,
        }
    }

    /// The plan of a partition, checked and simulated; `None` when its memory exceeds the limit.
    pub(super) fn complete_within_limit(&self, sized: SizedPlan) -> Option<FeasiblePlan> {
        (sized.peak_arena() <= self.request.arena_limit()).then(|| self.complete(sized))
    }

    /// Time of a step of this program beyond its kernels, in the scale of simulated times: that of the executor, and that which
    /// exact steps of LORO add on average.
    fn beyond_kernels(&self, program: &Program) -> Seconds {
        let exact_step = ExactStepTime::of(program, &self.request.profile);
        self.with_executor(exact_step.map_or(Seconds(0.0), |exact_step| exact_step.per_step()))
    }

    /// A lower bound on the time of a step of a context beyond its kernels, in the scale of simulated times.
    pub(crate) fn beyond_kernels_min(&self, context: &Context) -> Seconds {
        let least = |work: &ExactStepWork| work.least_per_step(context);
        self.with_executor(self.exact_work.as_ref().map_or(Seconds(0.0), least))
    }

    /// Time of exact steps and of the executor, which its step factor does not multiply, in the scale of simulated times.
    fn with_executor(&self, exact_steps: Seconds) -> Seconds {
        let launch_costs = self.request.profile.launch_costs(self.request.executor);
        (exact_steps + Seconds(launch_costs.step_s)) * (1.0 / launch_costs.step_factor)
    }

    fn resolve(&self, plan: &Plan) -> ResolvedPlan {
        plan.resolve(&self.request.model)
            .unwrap_or_else(|defects| unreachable!("the planner wrote an invalid plan: {defects}"))
    }
}
