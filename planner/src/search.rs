//! The outer search: every context bounded from below, the promising ones solved exactly.
//!
//! 1. Contexts (mesh, microbatch, ZeRO) that cannot hold the model are dropped.
//! 2. Each gets a bound: with T the least forward and backward time of a microbatch, u the least
//!    step phase of an average stage, m microbatches and P stages, no 1F1B step is shorter than
//!    m·T/P + u, nor than T / (1 − (1 − 1/m)ᴾ), which stages in the best proportion would reach.
//! 3. The most promising contexts get a better bound, from dividing the blocks among the stages
//!    within the bytes there are. Those that stay the most promising are fitted: lowered, placed and
//!    simulated, until no bound is better than what was found.

use std::time::Instant;

use narrows_plan::Seconds;
use narrows_plan::strategy::{Context, TiedWeight};
use rayon::prelude::*;

use crate::bound::{bound, quick_bound};
use crate::candidates::contexts;
use crate::deadline::Deadline;
use crate::fit::{ContextSolution, ContextSolver, FeasiblePlan, Infeasible, MemoryEvidence};
use crate::outlook::ContextBounds;
use crate::request::Request;
use crate::segments::SegmentSolver;
use crate::verdict::ProofState;

/// How the search went.
#[derive(Clone, Debug)]
pub struct SearchReport {
    /// What ended it.
    pub status: SearchStatus,
    /// Relative difference between the plan's time and the proven bound.
    pub gap: f64,
    /// No plan is faster than this.
    pub bound: Seconds,
    /// Contexts and partitions that were priced.
    pub candidates_priced: u64,
    /// Contexts that a bound or the memory excluded before they were solved.
    pub candidates_pruned: u64,
    /// Segments solved to optimality.
    pub segment_solves: u64,
    /// Wall time.
    pub wall_time: std::time::Duration,
    /// What became of every context, best bound first.
    pub contexts: Vec<ContextReport>,
}

/// What ended the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchStatus {
    /// The plan is proven the fastest of the space.
    Optimal,
    /// No plan is faster than the bound, but the plan found is slower; or none was found that fits,
    /// and one may exist.
    GapLimit,
    /// Time ran out first.
    TimeLimit,
    /// It is proved that no plan exists.
    Infeasible,
}

impl SearchStatus {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            SearchStatus::Optimal => "optimal",
            SearchStatus::GapLimit => "gap_limit",
            SearchStatus::TimeLimit => "time_limit",
            SearchStatus::Infeasible => "infeasible",
        }
    }
}

/// What became of a context.
#[derive(Clone, Debug)]
pub struct ContextReport {
    /// Mesh, microbatch, ZeRO.
    pub context: Context,
    /// No plan in it is faster; `None` when none exists at all.
    pub bound: Option<Seconds>,
    /// How it ended.
    pub fate: ContextOutcome,
}

impl ContextReport {
    /// Whether it is proved that no plan exists here, rather than that none was found that fits.
    pub fn is_proved_empty(&self) -> bool {
        match self.fate {
            ContextOutcome::Refused(Infeasible::Memory { of, .. }) => of == MemoryEvidence::Every,
            ContextOutcome::Refused(Infeasible::NoStrategy) => true,
            _ => false,
        }
    }
}

/// How a context ended.
#[derive(Clone, Debug)]
pub enum ContextOutcome {
    /// Solved: the step time of its best plan.
    Solved(Seconds),
    /// Its bound is no better than another context's plan.
    Pruned,
    /// Its bound is better, but no plan in it was found to be faster than another context's.
    Unbeaten,
    /// Nothing legal, or nothing that fits.
    Refused(Infeasible),
    /// The time limit came first.
    NotReached,
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct SearchResult {
    /// The best plan, if any exists.
    pub best: Option<FeasiblePlan>,
    /// How the search went.
    pub report: SearchReport,
}

struct BoundedContext {
    context: Context,
    bound: Result<Seconds, Infeasible>,
    /// What its bytes allow, once that was asked.
    outlook: Option<ContextBounds>,
}

/// How many contexts are followed up side by side.
const CHUNK: usize = 4;

/// What became of a context, with its plan and what it proves.
struct ContextResult {
    fate: ContextOutcome,
    fitted: Option<FeasiblePlan>,
    proven: f64,
    is_interrupted: bool,
}

impl ContextResult {
    fn without_plan(fate: ContextOutcome, proven: f64) -> ContextResult {
        let is_interrupted = matches!(fate, ContextOutcome::NotReached);
        ContextResult { fate, fitted: None, proven, is_interrupted }
    }
}

impl BoundedContext {
    /// The bound; infinite where nothing exists.
    fn least(&self) -> f64 {
        self.bound.as_ref().map_or(f64::INFINITY, |bound| bound.0)
    }

    /// Whether more must be known before it is worth fitting.
    fn is_vague(&self) -> bool {
        self.bound.is_ok() && self.outlook.is_none()
    }

    /// Bounds the context by what its bytes allow.
    fn look(&mut self, fitter: &ContextSolver, incumbent: f64) {
        let outlook = fitter.outlook(&self.context, incumbent);
        let seen = outlook.bound(incumbent);
        self.bound = seen.map(|seen| Seconds(seen.0.max(self.least())));
        self.outlook = Some(outlook);
    }

    /// Fits the context, unless its bound or the deadline says that it need not or cannot be.
    fn end(&self, fitter: &ContextSolver, incumbent: f64) -> ContextResult {
        let bound = match &self.bound {
            Err(refusal) => {
                return ContextResult::without_plan(
                    ContextOutcome::Refused(refusal.clone()),
                    f64::INFINITY,
                );
            }
            Ok(bound) => bound.0,
        };
        if bound >= incumbent {
            return ContextResult::without_plan(ContextOutcome::Pruned, f64::INFINITY);
        }
        let Some(outlook) = self.outlook.as_ref().filter(|_| !fitter.segments.is_late()) else {
            return ContextResult::without_plan(ContextOutcome::NotReached, bound);
        };
        let ContextSolution { best, proven: least, is_interrupted } =
            fitter.fit(&self.context, outlook, incumbent);
        match best {
            Ok(Some(fitted)) => ContextResult {
                fate: ContextOutcome::Solved(fitted.time),
                fitted: Some(fitted),
                proven: least.0,
                is_interrupted,
            },
            // Nothing was found, and not all was tried: neither a proof nor a refusal.
            _ if is_interrupted => {
                ContextResult::without_plan(ContextOutcome::NotReached, least.0.min(bound))
            }
            Ok(None) if least.0 < incumbent => {
                ContextResult::without_plan(ContextOutcome::Unbeaten, least.0)
            }
            Ok(None) => ContextResult::without_plan(ContextOutcome::Pruned, least.0),
            Err(refusal) => ContextResult::without_plan(ContextOutcome::Refused(refusal), least.0),
        }
    }
}

/// Searches the whole space of a request.
pub fn search(request: &Request) -> SearchResult {
    search_until(request, &Deadline::after(request.time_limit))
}

/// Searches the whole space of a request until a deadline, whatever its own time limit is.
pub fn search_until(request: &Request, deadline: &Deadline) -> SearchResult {
    let begin = Instant::now();
    let segments = SegmentSolver::new(request, deadline.clone());
    let fitter = ContextSolver::new(request, &segments);
    let contexts = contexts(request);
    // Where time is short, a plan comes before all proofs.
    let mut best = if deadline.exists() { fitter.hurried(&contexts) } else { None };
    // Half of the time at most goes into bounds, so that some is left to fit plans.
    let mut bounded: Vec<BoundedContext> = contexts
        .into_par_iter()
        .map(|context| {
            let bound = match deadline.is_half_over() {
                false => bound(request, &segments, &context),
                true => quick_bound(request, &context),
            };
            BoundedContext { context, bound, outlook: None }
        })
        .collect();

    bounded.sort_by(|a, b| a.least().total_cmp(&b.least()));
    let opened: Vec<(Context, f64)> =
        bounded.iter().filter(|b| b.bound.is_ok()).map(|b| (b.context, b.least())).collect();
    if !deadline.is_half_over() {
        best = faster(best, fitter.opening(&opened));
    }
    let mut reports = vec![];
    let mut proven = f64::INFINITY;
    let mut out_of_time = false;
    // Chunks are followed up side by side against the same incumbent, so that the outcome does not
    // depend on the number of threads.
    while !bounded.is_empty() {
        bounded.sort_by(|a, b| a.least().total_cmp(&b.least()));
        let to_beat = best.as_ref().map_or(f64::INFINITY, |fitted: &FeasiblePlan| fitted.time.0);
        let size = CHUNK.min(bounded.len());
        let late = segments.is_late();
        let mut vague: Vec<&mut BoundedContext> = bounded[..size]
            .iter_mut()
            .filter(|bounded| bounded.is_vague() && bounded.least() < to_beat && !late)
            .collect();
        if !vague.is_empty() {
            vague.par_iter_mut().for_each(|bounded| bounded.look(&fitter, to_beat));
            continue;
        }
        let chunk: Vec<BoundedContext> = bounded.drain(..size).collect();
        let ends: Vec<ContextResult> =
            chunk.par_iter().map(|bounded| bounded.end(&fitter, to_beat)).collect();
        for (BoundedContext { context, bound, .. }, ending) in chunk.into_iter().zip(ends) {
            proven = proven.min(ending.proven);
            out_of_time |= ending.is_interrupted;
            best = faster(best, ending.fitted);
            // Fitting proves more than the bound that put the context in its place.
            let refined = ending.proven.min(to_beat);
            let bound = bound.ok().map(|bound| match ending.fate {
                ContextOutcome::Pruned if refined.is_finite() => Seconds(bound.0.max(refined)),
                _ => bound,
            });
            reports.push(ContextReport { context, bound, fate: ending.fate });
        }
    }
    best = match best {
        best if segments.is_late() => {
            out_of_time |= best.is_none();
            best
        }
        None => last_resort(request, &fitter, &reports),
        Some(best) => Some(narrowed(request, &fitter, &reports, best, proven)),
    };
    if let Some(best) = &best {
        // What the search opened with may stay unbeaten.
        let of_best = |report: &&mut ContextReport| report.context == best.decided.context;
        if let Some(report) = reports.iter_mut().find(of_best) {
            report.fate = ContextOutcome::Solved(best.time);
        }
    }
    let proof = ProofState { proven, out_of_time, has_unproven: segments.has_unproven() };
    let time = best.as_ref().map(|fitted| fitted.time.0);
    let report = SearchReport {
        candidates_priced: fitter.priced() + reports.len() as u64 + segments.solves(),
        segment_solves: segments.solves(),
        wall_time: begin.elapsed(),
        ..proof.report(request, time, reports)
    };
    let report = report.of_steps(request.profile.launching(request.executor).step_factor);
    SearchResult { best, report }
}

/// The faster of two plans; the first of equals.
fn faster(one: Option<FeasiblePlan>, other: Option<FeasiblePlan>) -> Option<FeasiblePlan> {
    let to_beat = one.as_ref().map_or(f64::INFINITY, |fitted| fitted.time.0);
    other.filter(|fitted| fitted.time.0 < to_beat).or(one)
}

/// How many contexts are tried once more when no plan fits.
const LAST_TRIED_MAX: usize = 2;

/// The smallest plans under narrower rules, where plans by all rules were a little too large.
fn last_resort(
    request: &Request,
    fitter: &ContextSolver,
    reports: &[ContextReport],
) -> Option<FeasiblePlan> {
    let lowered = |report: &ContextReport| match &report.fate {
        ContextOutcome::Refused(Infeasible::Memory {
            needed, of: MemoryEvidence::Lowered, ..
        }) => Some((*needed, report.context)),
        _ => None,
    };
    let mut smallest: Vec<_> = reports.iter().filter_map(lowered).collect();
    smallest.sort_by_key(|(needed, _)| *needed);
    let tried = smallest.iter().take(LAST_TRIED_MAX);
    let mut fitted = tried.filter_map(|(_, context)| fitter.smallest_of_narrower(context));
    fitted.find(|fitted| fitted.peak() <= request.memory_bytes())
}

/// Where memory binds and a plan may be faster, what fewer decisions lead to in the most promising
/// contexts.
fn narrowed(
    request: &Request,
    fitter: &ContextSolver,
    reports: &[ContextReport],
    mut best: FeasiblePlan,
    proven: f64,
) -> FeasiblePlan {
    let filled = best.peak().as_f64() / request.memory_bytes().as_f64();
    if filled < BINDING || proven >= best.time.0 * (1.0 - WORTH_NARROWING) {
        return best;
    }
    let searched = |report: &&ContextReport| {
        matches!(report.fate, ContextOutcome::Solved(_) | ContextOutcome::Unbeaten)
    };
    let bound = |report: &ContextReport| report.bound.map_or(f64::INFINITY, |bound| bound.0);
    let mut open: Vec<&ContextReport> = reports.iter().filter(searched).collect();
    open.sort_by(|a, b| bound(a).total_cmp(&bound(b)));
    for report in open.into_iter().take(LAST_TRIED_MAX) {
        if bound(report) < best.time.0
            && let Some(faster) = fitter.faster_of_narrower(&report.context, best.time.0)
        {
            best = faster;
        }
    }
    best
}

/// The share of the memory from which on it is taken to bind.
const BINDING: f64 = 0.8;

/// The gap from which on narrower rules are searched.
const WORTH_NARROWING: f64 = 0.01;

impl SearchReport {
    /// Times of steps, as predictions give them, instead of times of their kernels.
    fn of_steps(mut self, factor: f64) -> SearchReport {
        self.bound = self.bound * factor;
        for context in &mut self.contexts {
            context.bound = context.bound.map(|bound| bound * factor);
            if let ContextOutcome::Solved(time) = &mut context.fate {
                *time = *time * factor;
            }
        }
        self
    }
}

/// How the weight of tied ends may lie; one `None` for untied ones.
pub(crate) fn tied_weights(request: &Request) -> Vec<Option<TiedWeight>> {
    if request.model.tied { TiedWeight::ALL.into_iter().map(Some).collect() } else { vec![None] }
}
