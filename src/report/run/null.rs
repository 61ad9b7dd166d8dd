//! The report of the null backend: instructions and bytes of a step, counted without executing it.

use narrows_plan::model::Model;
use narrows_plan::{Bytes, Mesh, Plan};
use narrows_runtime::{BytesByKindAndAxis, DeviceReport, StepReport};
use serde::Serialize;

use crate::args::Detail;
use crate::report::Report;
use crate::report::page::{Align, Cell, Page};
use crate::text::{mesh_and_schedule, plural, thousands};

/// Output of `run --backend null`.
#[derive(Serialize)]
pub struct NullRunReport {
    backend: &'static str,
    model: String,
    mesh: Mesh,
    /// All devices of a stage do the same amounts of work.
    stages: Vec<StageActivity>,
    /// Mesh and schedule in words.
    #[serde(skip)]
    mesh_and_schedule: String,
    /// Whether the plan has exact steps, which are not counted.
    #[serde(skip)]
    has_exact_steps: bool,
}

/// The work of each device of a stage in a step.
#[derive(Serialize)]
struct StageActivity {
    instructions: std::collections::BTreeMap<&'static str, u64>,
    collectives: u64,
    collective_bytes: BytesByKindAndAxis,
    collective_sent_bytes: BytesByKindAndAxis,
    transfer_sent_bytes: u64,
    transfer_received_bytes: u64,
    allocated_bytes: u64,
}

impl NullRunReport {
    /// The report of a counted step.
    pub fn new(
        backend: &'static str,
        model: &Model,
        plan: &Plan,
        report: &StepReport,
    ) -> NullRunReport {
        let stage = |device: &DeviceReport| StageActivity {
            instructions: device.instructions.clone(),
            collectives: device.collectives.values().map(|count| count.calls).sum(),
            collective_bytes: device.collective_bytes(|count| count.payload),
            collective_sent_bytes: device.collective_bytes(|count| count.sent),
            transfer_sent_bytes: device.sent.0,
            transfer_received_bytes: device.received.0,
            allocated_bytes: device.allocated.0,
        };
        let stages = report.stages.iter().map(stage).collect();
        NullRunReport {
            backend,
            model: model.name.clone(),
            mesh: report.mesh,
            stages,
            mesh_and_schedule: mesh_and_schedule(plan),
            has_exact_steps: plan.loro_every.is_some(),
        }
    }
}

impl Report for NullRunReport {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        let devices = plural(self.mesh.devices(), "device");
        page.heading(format!("One step of {} on {devices}, counted", self.model));
        page.line(&self.mesh_and_schedule);
        page.heading("Per device");
        let row = |(index, stage): (usize, &StageActivity)| {
            let sent = stage.collective_sent_bytes.values().flat_map(|axes| axes.values()).sum();
            vec![
                index.to_string().into(),
                thousands(stage.instructions.values().sum()).into(),
                thousands(stage.collectives).into(),
                Bytes(sent).into(),
                Bytes(stage.transfer_sent_bytes).into(),
                Bytes(stage.allocated_bytes).into(),
            ]
        };
        let rows: Vec<Vec<Cell>> = self.stages.iter().enumerate().map(row).collect();
        let columns = [
            "stage",
            "instructions",
            "collectives",
            "bytes in collectives",
            "bytes by P2P",
            "memory",
        ];
        page.table(&columns.map(|name| (name, Align::Right)), &rows);
        if self.has_exact_steps {
            page.line(
                "The instructions of hosts in exact steps are not counted; `check` lists them.",
            );
        }
        page
    }
}
