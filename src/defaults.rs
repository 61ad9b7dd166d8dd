//! Defaults of planning requests for omitted flags.

/// Values of the flags that describe a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestDefaults {
    /// Model preset; `None` when `--model` is required.
    pub model: Option<&'static str>,
    /// Hardware preset.
    pub hardware: &'static str,
    /// Number of devices.
    pub devices: u64,
    /// Sequences in a step, rounded up to a multiple of the devices.
    pub global_batch: u64,
    /// Tokens in a sequence, or the model's longest when that is less.
    pub sequence_length: u64,
}

impl RequestDefaults {
    /// Defaults of `plan`, `cost` and `explain`: one sequence per device, as long as those of the published
    /// measurements.
    pub const PLAN: RequestDefaults = RequestDefaults {
        model: None,
        hardware: "a100-80gb",
        devices: 1,
        global_batch: 1,
        sequence_length: 4096,
    };

    /// Defaults of `run`: small enough to show learning on a CPU within minutes. One device uses all cores,
    /// because its threads share one memory, while a device per core would add collectives and move parameters:
    /// on two cores the fastest step took 0.142 s with one device and 0.189 s with two.
    pub const RUN: RequestDefaults = RequestDefaults {
        model: Some("cola-tiny"),
        hardware: "cpu-local",
        devices: 1,
        global_batch: 8,
        sequence_length: 128,
    };
}
