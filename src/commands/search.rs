//! The plan search of commands, with progress and warnings.

use std::sync::Once;

use narrows_cost_model::Profile;
use narrows_planner::{Request, SearchResult, search as search_plans};

use crate::args::OutputFormat;
use crate::output;
use crate::progress::with_spinner;
use crate::text::plural;

/// Searches for the fastest plan, with a spinner on a terminal.
pub fn search(request: &Request, format: OutputFormat) -> SearchResult {
    let Request { model, devices, profile, .. } = request;
    warn_of_measurement(profile);
    let message = format!("planning {} on {}", model.name, plural(*devices, "device"));
    with_spinner(&message, format == OutputFormat::Text, || search_plans(request))
}

/// Warns once about a profile whose measurement is not reliable.
pub fn warn_of_measurement(profile: &Profile) {
    static WARNED: Once = Once::new();
    if let Some(warning) = profile.warning() {
        WARNED.call_once(|| output::warn(&warning));
    }
}
