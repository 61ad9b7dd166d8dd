//! The plan search of commands, with progress and warnings.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};

use narrows_cost_model::Profile;
use narrows_planner::{
    Request, SearchCache, SearchResult, search_until_interrupted, search_until_stopped,
};

use crate::args::OutputFormat;
use crate::captured_output::stop_flag;
use crate::output;
use crate::progress::with_spinner;
use crate::signals::stop_in_order_during;
use crate::text::plural;

/// Searches for the fastest plan, with a spinner on a terminal. What follows the search may use its cache.
pub fn search(request: &Request, cache: &SearchCache, format: OutputFormat) -> SearchResult {
    search_until(request, cache, format, &stop_flag().unwrap_or_default())
}

/// As [`search`]; the first signal ends the search as a time limit does, with the best plan so far.
pub fn search_until_signal(
    request: &Request,
    cache: &SearchCache,
    format: OutputFormat,
) -> SearchResult {
    until_signal(|stop| search_until(request, cache, format, stop))
}

/// Runs a search, and what follows it, with a flag that the first signal sets.
pub fn until_signal<T>(task: impl FnOnce(&Arc<AtomicBool>) -> T) -> T {
    stop_in_order_during("Ctrl-C will end the search without a plan", task)
}

/// As [`search`]; ends soon after `stop` is set, with the best plan so far.
pub fn search_until(
    request: &Request,
    cache: &SearchCache,
    format: OutputFormat,
    stop: &Arc<AtomicBool>,
) -> SearchResult {
    let Request { model, devices, profile, .. } = request;
    warn_of_measurement(profile);
    let message = format!("planning {} on {}", model.name, plural(*devices, "device"));
    let result = with_spinner(&message, format == OutputFormat::Text, || match stop_flag() {
        // The answer of a command that another program stops is dropped.
        Some(_) => search_until_stopped(request, cache, stop),
        None => search_until_interrupted(request, cache, stop),
    });
    warn_of_failed_solves(result.report.failed_solves);
    if result.report.has_refuted_bound {
        output::warn(
            "the plan is better than the bound of its search, which is a defect of this program: please report \
             the request. The reported bound is that of the model's size alone",
        );
    }
    result
}

/// Warns where the library failed to solve integer programs.
pub fn warn_of_failed_solves(failed_solves: u64) {
    if let Some(warning) = failure_warning(failed_solves) {
        output::warn(&warning);
    }
}

/// Warning of a search in which the library failed to solve this many integer programs.
fn failure_warning(failed_solves: u64) -> Option<String> {
    let programs = plural(failed_solves, "integer program");
    let text =
        format!("the solver failed on {programs}: a faster plan may exist within the reported gap");
    (failed_solves > 0).then_some(text)
}

/// Warns once about a profile whose measurement is not reliable.
pub fn warn_of_measurement(profile: &Profile) {
    static WARNED: Once = Once::new();
    if let Some(warning) = profile.warning() {
        let hint = "`narrows calibrate` measures anew, on an idle machine";
        WARNED.call_once(|| output::warn(&format!("{warning}. {hint}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_integer_programs_are_reported() {
        assert_eq!(failure_warning(0), None);
        let warning = failure_warning(2).expect("a warning");
        assert!(warning.starts_with("the solver failed on 2 integer programs"), "{warning}");
    }
}
