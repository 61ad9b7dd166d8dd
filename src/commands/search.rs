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
use crate::search_defects::SearchDefects;
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
    SearchDefects::of(&result.report).warn();
    result
}

/// Warns once about a profile whose measurement is not reliable.
pub fn warn_of_measurement(profile: &Profile) {
    static WARNED: Once = Once::new();
    if let Some(warning) = profile.warning() {
        let hint = "`narrows calibrate` measures anew, on an idle machine";
        WARNED.call_once(|| output::warn(&format!("{warning}. {hint}")));
    }
}
