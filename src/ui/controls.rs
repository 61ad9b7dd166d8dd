//! The controls of the page, and the presets that they offer.

use std::ffi::OsStr;

use narrows_cost_model::{Profile, profile};
use narrows_plan::model::{Model, presets};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::settings::PageSettings;
use crate::errors::CommandResult;
use crate::input;
use crate::text::{count, plural};

/// A number that a slider moves.
#[derive(Serialize)]
struct Control {
    /// Field as `whatif --sweep` names it.
    field: &'static str,
    label: &'static str,
    /// Unit, or a sentence about the value that is used where none is set.
    note: &'static str,
    /// Values of the slider; any other can be typed.
    stops: Vec<f64>,
}

/// A model or profile with the values of the fields that controls set.
#[derive(Serialize)]
struct Preset {
    name: String,
    description: String,
    /// Values by field; `null` for a field that does not apply.
    values: Map<String, Value>,
}

const RANK: &str = "rank";
const SEQUENCE_LENGTH: &str = "sequence_length";
const INTRA_NODE: &str = "hardware.links.intra_node.bandwidth_gbps";
const INTER_NODE: &str = "hardware.links.inter_node.bandwidth_gbps";
const MEMORY: &str = "hardware.device.memory_gib";

/// Model and devices that the page begins with.
pub const MODEL: &str = "cola-7b";
const DEVICES: u64 = 16;
const BATCH: u64 = 64;

/// Presets, controls, and the settings that the page begins with, as JSON.
///
/// # Errors
/// Model or hardware of the command line cannot be read, and flags that cannot be planned with.
pub fn options(settings: &PageSettings) -> CommandResult<Value> {
    let mut models = vec![];
    for name in with_own(&settings.model, presets::names()) {
        models.push(model_preset(name.as_ref())?);
    }
    let mut hardware = vec![];
    let names = profile::preset_names().map(str::to_owned);
    for name in with_own(&settings.hardware, names) {
        hardware.push(hardware_preset(name.as_ref())?);
    }
    let first = settings.first(DEVICES, BATCH);
    settings.require_valid_flags(&first)?;
    Ok(json!({"models": models, "hardware": hardware, "controls": controls(), "settings": first}))
}

/// The names of presets, after a file of the command line.
fn with_own(own: &OsStr, presets: impl IntoIterator<Item = String>) -> Vec<String> {
    let presets: Vec<String> = presets.into_iter().collect();
    let own = own.to_string_lossy().into_owned();
    let own = (!presets.contains(&own)).then_some(own);
    own.into_iter().chain(presets).collect()
}

fn controls() -> Vec<Control> {
    let doubled = |first: f64, last: f64| {
        std::iter::successors(Some(first), |value| Some(2.0 * value))
            .take_while(|value| *value <= last)
            .collect()
    };
    let control = |field, label, note, stops| Control { field, label, note, stops };
    vec![
        control("devices", "Devices", "", doubled(1.0, 512.0)),
        control(
            "global_batch",
            "Global batch",
            "sequences in a step; if empty, one for each device",
            doubled(1.0, 4096.0),
        ),
        control("micro_batch", "Microbatch", "sequences; if empty, searched", doubled(1.0, 64.0)),
        control(SEQUENCE_LENGTH, "Sequence length", "tokens", doubled(512.0, 131_072.0)),
        control(
            RANK,
            "Rank",
            "of every factor pair",
            [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048].map(f64::from).to_vec(),
        ),
        control(
            INTRA_NODE,
            "Bandwidth in a node",
            "GB/s: all links of a device, one direction",
            vec![16.0, 32.0, 64.0, 100.0, 150.0, 200.0, 300.0, 450.0, 600.0, 900.0],
        ),
        control(
            INTER_NODE,
            "Bandwidth between nodes",
            "GB/s: one network card, one direction",
            vec![1.25, 3.125, 6.25, 12.5, 25.0, 50.0, 100.0, 200.0],
        ),
        control(
            MEMORY,
            "Memory of a device",
            "GiB",
            vec![16.0, 24.0, 32.0, 40.0, 48.0, 64.0, 80.0, 96.0, 128.0, 141.0, 192.0, 288.0],
        ),
    ]
}

fn model_preset(argument: &OsStr) -> CommandResult<Preset> {
    let model = input::model(argument)?;
    let ranks = ranks(&model);
    let rank = match ranks[..] {
        [] => "dense".to_owned(),
        [rank] => format!("rank {rank}"),
        [first, .., last] => format!("ranks {first} to {last}"),
    };
    let blocks = plural(model.blocks.len() as u64, "block");
    let parameters = count(model.parameters());
    let values = [
        // Where factor pairs differ in rank, no one value is that of all.
        (RANK, ranks.first().map(|rank| json!(rank))),
        (SEQUENCE_LENGTH, Some(json!(model.max_sequence_length.min(4096)))),
    ];
    Ok(Preset {
        name: argument.to_string_lossy().into_owned(),
        description: format!("{parameters} parameters, {blocks}, {rank}"),
        values: values.into_iter().map(|(field, value)| (field.into(), json!(value))).collect(),
    })
}

/// The distinct ranks of a model in ascending order.
fn ranks(model: &Model) -> Vec<u64> {
    let linears = model.blocks.iter().flat_map(|block| block.linears());
    let mut ranks: Vec<u64> = linears.filter_map(|(_, linear)| linear.rank()).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

fn hardware_preset(argument: &OsStr) -> CommandResult<Preset> {
    let profile: Profile = input::profile(argument)?;
    let links = &profile.file().links;
    let values = [
        (INTRA_NODE, links.intra_node.bandwidth_bytes_per_s / 1e9),
        (INTER_NODE, links.inter_node.bandwidth_bytes_per_s / 1e9),
        (MEMORY, profile.memory().as_f64() / f64::from(1 << 30)),
    ];
    Ok(Preset {
        name: argument.to_string_lossy().into_owned(),
        description: profile.file().description.clone(),
        values: values.into_iter().map(|(field, value)| (field.into(), json!(value))).collect(),
    })
}
