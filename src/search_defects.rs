//! Defects of searches that have an answer all the same.

use std::iter::Sum;

use narrows_planner::SearchReport;

use crate::output;
use crate::text::plural;

/// Defects of one search, or of several.
#[derive(Clone, Copy, Debug, Default)]
pub struct SearchDefects {
    /// Integer programs that the library failed to solve.
    failed_solves: u64,
    /// Searches whose plan is better than the bound on all plans.
    refuted_bounds: u64,
}

impl SearchDefects {
    /// The defects of a search.
    pub fn of(report: &SearchReport) -> SearchDefects {
        SearchDefects {
            failed_solves: report.failed_solves,
            refuted_bounds: u64::from(report.has_refuted_bound),
        }
    }

    /// Warns of each kind of defect that there is.
    pub fn warn(self) {
        self.warnings().into_iter().for_each(|warning| output::warn(&warning));
    }

    fn warnings(self) -> Vec<String> {
        let SearchDefects { failed_solves, refuted_bounds } = self;
        let mut warnings = vec![];
        if failed_solves > 0 {
            let programs = plural(failed_solves, "integer program");
            warnings.push(format!(
                "the solver failed on {programs}: a faster plan may exist within the reported gap"
            ));
        }
        if refuted_bounds > 0 {
            let searches = plural(refuted_bounds, "search");
            warnings.push(format!(
                "the plan of {searches} is better than the bound on all plans, which is a defect of this program: \
                 please report the request. The reported bound is that of the model's size alone"
            ));
        }
        warnings
    }
}

impl Sum for SearchDefects {
    fn sum<I: Iterator<Item = SearchDefects>>(defects: I) -> SearchDefects {
        defects.fold(SearchDefects::default(), |a, b| SearchDefects {
            failed_solves: a.failed_solves + b.failed_solves,
            refuted_bounds: a.refuted_bounds + b.refuted_bounds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_defect_is_reported_once() {
        let none = SearchDefects::default();
        assert!(none.warnings().is_empty());
        let failed = SearchDefects { failed_solves: 1, ..none };
        let refuted = SearchDefects { refuted_bounds: 1, ..none };
        let warnings =
            [failed, none, refuted, failed].into_iter().sum::<SearchDefects>().warnings();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].starts_with("the solver failed on 2 integer programs"), "{warnings:?}");
        assert!(warnings[1].starts_with("the plan of 1 search is better"), "{warnings:?}");
    }
}
