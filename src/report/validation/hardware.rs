//! Hardware that measurements name.

use narrows_calibration::validation::ComparedMeasurement;
use serde::Serialize;

use crate::args::{MeasurementInput, ValidateSettings};
use crate::report::page::Page;

/// A profile that measurements name.
#[derive(Serialize)]
pub(super) struct HardwareReport<'a> {
    name: &'a str,
    /// The path of its file, or that it is a preset.
    from: &'a str,
    /// Whether a file replaces the preset of the same name.
    hides_preset: bool,
}

/// The profiles that measurements name, each once.
pub(super) fn named_by<'a>(
    settings: &'a ValidateSettings,
    compared: &'a [ComparedMeasurement<'a>],
) -> Vec<HardwareReport<'a>> {
    let mut reports: Vec<HardwareReport> = vec![];
    for entry in compared {
        let name = entry.measurement.hardware.as_str();
        if reports.iter().all(|known| known.name != name) {
            let input = settings.profile(name);
            let file = input.filter(|input| input.path != name);
            reports.push(HardwareReport {
                name,
                from: file.map_or("the preset", |file| file.path.as_str()),
                hides_preset: input.is_some_and(MeasurementInput::replaces_preset),
            });
        }
    }
    reports
}

/// The profiles.
pub(super) fn list(page: &mut Page, profiles: &[HardwareReport]) {
    page.heading("Hardware");
    for HardwareReport { name, from, hides_preset } in profiles {
        let replacement =
            if *hides_preset { ", which replaces the preset of that name" } else { "" };
        page.line(format!("{name}: {from}{replacement}"));
    }
}
