//! The context solvers of each number of devices.

use narrows_plan::Context;

use crate::context::ContextSolver;
use crate::context_space::contexts;
use crate::feasible_plan::FeasiblePlan;
use crate::report::SearchReport;
use crate::request::Request;
use crate::segment::SegmentSolver;

/// Solvers of contexts by number of devices.
pub(crate) struct ContextSolvers<'a> {
    by_devices: Vec<ContextSolver<'a>>,
    segments: &'a [SegmentSolver<'a>],
}

impl<'a> ContextSolvers<'a> {
    /// A solver for each request and its segments.
    pub(crate) fn new(requests: &'a [Request], segments: &'a [SegmentSolver<'a>]) -> Self {
        let solver = |(request, segments)| ContextSolver::new(request, segments);
        let by_devices = requests.iter().zip(segments).map(solver).collect();
        ContextSolvers { by_devices, segments }
    }

    /// The solver of a context.
    pub(crate) fn of(&self, context: &Context) -> &ContextSolver<'a> {
        let devices = context.mesh.devices();
        let index = self.by_devices.partition_point(|solver| solver.request.devices < devices);
        &self.by_devices[index]
    }

    /// A first plan without a bound, on as many devices as possible: these have the most memory.
    pub(crate) fn first_feasible(&self) -> Option<FeasiblePlan> {
        let most_devices_first = self.by_devices.iter().rev();
        most_devices_first
            .filter_map(|solver| solver.first_feasible(&contexts(solver.request)))
            .next()
    }

    /// Adds the effort of all solvers to the report of a search.
    pub(crate) fn add_effort(&self, report: &mut SearchReport) {
        for solver in &self.by_devices {
            report.candidates_priced += solver.candidates_priced();
            for segments in solver.all_segments() {
                report.candidates_priced += segments.solve_count();
                report.segment_solves += segments.solve_count();
                report.failed_solves += segments.failed_solves();
                for (method, solves) in segments.table_solves() {
                    let total = report.table_solves.entry(method).or_default();
                    total.proven += solves.proven;
                    total.limited += solves.limited;
                }
            }
        }
    }

    /// Whether some solve ended by a limit or a failure instead of a proof.
    pub(crate) fn have_unproven(&self) -> bool {
        self.segments.iter().any(SegmentSolver::has_unproven)
    }
}
