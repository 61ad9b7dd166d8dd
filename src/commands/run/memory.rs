//! The memory that a run needs, compared with that of the machine.

use narrows_cpu::{GatheredTensors, memory_lower_bound, node_memory_lower_bound};
use narrows_plan::Bytes;
use narrows_plan::model::Model;
use narrows_plan::program::Program;

use crate::args::TrainSettings;
use crate::cluster::LaunchedProcess;
use crate::errors::{CommandResult, Failure, Problem};
use crate::host::available_memory;

/// Checks that the machine has the memory for a run. The system would kill a larger run without a message.
pub fn require_memory(
    model: &Model,
    program: &Program,
    training: &TrainSettings,
) -> CommandResult<()> {
    let checkpoints = training.checkpoints.as_ref();
    let needed = match &training.process {
        None => {
            let gathered = match checkpoints {
                Some(_) => GatheredTensors::WeightsAndMoments,
                None => GatheredTensors::Weights,
            };
            memory_lower_bound(model, program, gathered)
        }
        Some(LaunchedProcess { launch, .. }) => {
            let mode = checkpoints.map(|settings| settings.mode);
            node_memory_lower_bound(model, program, mode, launch.node_ranks())
        }
    };
    let Some(available) = available_memory().filter(|available| needed > *available) else {
        return Ok(());
    };
    let largest = Bytes(program.stages.iter().map(|stage| stage.arena.0).max().unwrap_or(0));
    let message = format!("training {} needs {needed}, and {available} are free", model.name);
    let cause = match program.context.mesh.devices() {
        1 => format!("because its buffers take {largest}"),
        devices => format!("because the buffers of each of {devices} devices take up to {largest}"),
    };
    let problem = Problem::new("memory", message)
        .because([cause])
        .hint("a smaller model, --global-batch, --micro-batch or --sequence-length")
        .hint("--backend null, which counts what the devices would do and allocates nothing");
    Err(Failure::failed(vec![problem]))
}
