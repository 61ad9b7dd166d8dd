//! `narrows schema`: prints the JSON Schema of a file format or an answer.

use narrows_calibration::measurements;
use narrows_cost_model::profile;
use narrows_plan::{Plan, model};

use crate::args::{SchemaArgs, SchemaKind, recipe_schema};
use crate::errors::CommandResult;
use crate::output;
use crate::report::{
    self, CompareReport, ExportReport, FieldListReport, SensitivityReport, WhatIfReport,
};

/// Prints the schema.
pub fn run(args: &SchemaArgs) -> CommandResult<()> {
    output::print_json(&match args.kind {
        SchemaKind::Model => model::schema(),
        SchemaKind::Profile => profile::schema(),
        SchemaKind::Measurements => measurements::schema(),
        SchemaKind::Plan => Plan::schema(),
        SchemaKind::Recipe => recipe_schema(),
        SchemaKind::Compare => report::schema::<CompareReport>(),
        SchemaKind::Export => report::schema::<ExportReport>(),
        SchemaKind::WhatIf => report::schema::<WhatIfReport>(),
        SchemaKind::WhatIfList => report::schema::<FieldListReport>(),
        SchemaKind::Sensitivity => report::schema::<SensitivityReport>(),
    })
}
