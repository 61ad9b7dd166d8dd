//! The list of fields that can be swept.

use schemars::JsonSchema;
use serde::Serialize;

use super::Report;
use super::page::Page;
use crate::args::Detail;

/// Answer of `whatif --list`.
#[derive(Serialize, JsonSchema)]
#[schemars(title = "Narrows whatif --list answer")]
pub struct FieldListReport {
    /// Flags first, then the fields of the model and of the profile.
    fields: Vec<FieldReport>,
}

/// One field.
#[derive(Serialize, JsonSchema)]
struct FieldReport {
    /// The name, as `--sweep` and `--vary` take it.
    name: String,
    /// Help text of a flag, or the present value of a field.
    help: String,
}

impl FieldListReport {
    /// The report of fields with their help texts.
    pub fn new(fields: Vec<(String, String)>) -> FieldListReport {
        let field = |(name, help)| FieldReport { name, help };
        FieldListReport { fields: fields.into_iter().map(field).collect() }
    }
}

impl Report for FieldListReport {
    fn page(&self, _detail: Detail) -> Page {
        let mut page = Page::default();
        let (of_files, flags): (Vec<&FieldReport>, Vec<&FieldReport>) =
            self.fields.iter().partition(|field| field.name.contains('.'));
        let groups = [("Flags", flags), ("Fields of the model and the profile", of_files)];
        for (heading, fields) in groups {
            page.heading(heading);
            let fields: Vec<(&str, String)> =
                fields.into_iter().map(|field| (field.name.as_str(), field.help.clone())).collect();
            page.fields(&fields);
        }
        page.paragraph(
            "Bandwidths may be given in GB/s (…_gbps instead of …_bytes_per_s), sizes in GiB (…_gib), times in \
             microseconds (…_us).",
        );
        page
    }
}
