//! Branch and bound over the numbers of blocks of stages: in a mean of paths, parts of a block may be on several stages.

use std::collections::BTreeSet;

use super::super::mixed_division::{MixedDecisions, MixedDivision, apportioned};
use super::super::overhead::StageOverhead;
use super::super::schedule_paths::{PathCase, SchedulePath};
use super::stage_counts::StageCounts;
use super::{DivisionPaths, Multipliers, PathMean};

/// Divisions that are branched on.
const BRANCHES_MAX: usize = 40;
/// Divisions that are branched on before the bound must rise fast enough to reach its target with all of them.
const FIRST_BRANCHES: usize = 8;
/// Paths that were found last, which all later programs count.
const LAST_PATHS: usize = 64;

/// Divisions with a bound, in seconds.
struct Node {
    bound: f64,
    counts: StageCounts,
    multipliers: Multipliers,
}

impl PathMean<'_> {
    /// Lower bound in seconds on the divisions with any of these overheads, of which `enough` is enough. With a division near the best
    /// mix of each whose bound is less than `target`.
    pub(in crate::pipeline) fn branched(
        &mut self,
        choices: Vec<&[StageOverhead]>,
        (enough, target): (f64, f64),
        is_interrupted: &dyn Fn() -> bool,
    ) -> (f64, Vec<MixedDivision>) {
        let bound = |overheads| {
            let bound = self.bound(overheads, enough, is_interrupted);
            (bound, self.best.clone(), overheads)
        };
        let mut roots: Vec<_> = choices.into_iter().map(bound).collect();
        roots.retain(|(bound, ..)| *bound < target);
        roots.sort_by(|(a, ..), (b, ..)| a.total_cmp(b));
        let (mut least, mut divisions) = (enough, vec![]);
        for (bound, multipliers, overheads) in roots {
            let Some(multipliers) = multipliers else { return (bound, divisions) };
            let counts = StageCounts::any(overheads, self.segments.layer_shapes().len());
            let root = Node { bound, counts, multipliers };
            // A bound of one choice that is no larger than another is of no use.
            let node = self.largest_bound(root, overheads, least, is_interrupted);
            let Some((node, mut paths)) = node.filter(|(node, _)| node.bound < target) else {
                continue;
            };
            least = least.min(node.bound);
            divisions.extend(self.division(&node, &mut paths, target));
        }
        (least, divisions)
    }

    /// The node of the least bound of a tree, of which `target` is enough; `None` where no division is possible.
    fn largest_bound<'o>(
        &mut self,
        root: Node,
        overheads: &'o [StageOverhead],
        target: f64,
        is_interrupted: &dyn Fn() -> bool,
    ) -> Option<(Node, DivisionPaths<'o>)> {
        let known = root.bound;
        let mut counts = root.counts.clone();
        for (least, overhead) in counts.least.iter_mut().zip(overheads) {
            *least = usize::from(!overhead.is_empty);
        }
        let all = self.paths((overheads, &counts.least))?;
        let mut paths = DivisionPaths { all, overheads, counts: counts.clone() };
        let mut node = |counts: StageCounts, parent: &Node, paths: &mut DivisionPaths| {
            counts.are_possible().then(|| self.node(counts, parent, target, paths, is_interrupted))
        };
        let mut open = vec![];
        let mut first = node(counts, &root, &mut paths);
        // Of several blocks, those at the ends of longer collectives count in full.
        for stage in
            first.iter().flat_map(|first| first.multipliers.with_longer()).collect::<BTreeSet<_>>()
        {
            let Some(parent) = first.take_if(|first| first.bound < target) else { break };
            let [one, several] = parent.counts.one_or_several(stage);
            open.extend(node(one, &parent, &mut paths));
            first = node(several, &parent, &mut paths);
        }
        open.extend(first);
        for branch in 0..=BRANCHES_MAX {
            let least = (0..open.len()).min_by(|a, b| open[*a].bound.total_cmp(&open[*b].bound))?;
            let least = open.swap_remove(least);
            let share = branch as f64 / BRANCHES_MAX as f64;
            let is_slow = least.bound - known < share * (target - known);
            let is_last = least.bound >= target
                || branch == BRANCHES_MAX
                || branch >= FIRST_BRANCHES && is_slow
                || is_interrupted();
            let Some(children) = least.counts.branches().filter(|_| !is_last) else {
                return Some((least, paths));
            };
            open.extend(children.into_iter().filter_map(|counts| node(counts, &least, &mut paths)));
        }
        None
    }

    /// Divisions with these numbers of blocks, of those of the parent.
    fn node(
        &mut self,
        counts: StageCounts,
        parent: &Node,
        target: f64,
        paths: &mut DivisionPaths,
        is_interrupted: &dyn Fn() -> bool,
    ) -> Node {
        paths.counts = counts;
        let known = &parent.multipliers.found;
        if self.found.len() > 2 * LAST_PATHS {
            // Programs of many paths take long.
            let first = self.found.len() - LAST_PATHS;
            let mut numbers = 0..;
            let is_kept = |path: &(SchedulePath, PathCase)| {
                numbers.next().is_some_and(|number| number >= first) || known.contains(path)
            };
            self.found.retain(is_kept);
        }
        // Paths count more where stages have several blocks.
        paths.all = self.weighted_paths((paths.overheads, &paths.counts.least));
        self.mixed_times(paths, target);
        let first = self.of_known_paths(&parent.multipliers);
        let (bound, best) = self.raise(paths, first, target, is_interrupted);
        self.mixed_times(paths, target);
        let best = best.map(|best| self.with_paths(best));
        Node {
            bound: bound.max(parent.bound),
            counts: paths.counts.clone(),
            multipliers: best.unwrap_or_else(|| parent.multipliers.clone()),
        }
    }

    /// A division near the best mix of the divisions of a node.
    fn division(&self, node: &Node, paths: &mut DivisionPaths, unit: f64) -> Option<MixedDivision> {
        paths.counts = node.counts.clone();
        let mix = self.mix(paths, unit)?;
        let mut decisions: Vec<Vec<MixedDecisions>> = vec![vec![]; self.budgets.len()];
        for ((part, stage, class, candidate), number) in self.candidates(paths).zip(mix) {
            let spec = self.parts[part].spec;
            let solved = class
                .is_block()
                .then(|| self.segments.solved(spec, self.context, &candidate.decisions));
            if let Some(solved) = solved.flatten() {
                decisions[stage].push(MixedDecisions { shape: spec.shape, solved, number });
            }
        }
        let with_blocks = |(mixed, overhead): (&f64, &StageOverhead)| match overhead.is_empty {
            true => 0.0,
            false => (mixed - 1.0).max(0.0),
        };
        // Each stage that may have blocks has at least one.
        let mixed = node.counts.mixed.iter().zip(paths.overheads);
        let beyond_one: Vec<f64> = mixed.map(with_blocks).collect();
        let ones = paths.overheads.iter().map(|overhead| usize::from(!overhead.is_empty));
        let rest = node.counts.all.checked_sub(ones.clone().sum())?;
        let beyond_one = apportioned(rest, &beyond_one);
        let counts: Vec<usize> = beyond_one.into_iter().zip(ones).map(|(a, b)| a + b).collect();
        let is_division = counts.iter().sum::<usize>() == node.counts.all;
        is_division.then_some(MixedDivision { counts, decisions, bound: node.bound })
    }
}
