//! Plan files of small models, as text.

/// CoLA-60M under BTP.
pub const BTP: &str = include_str!("../data/btp.json");
/// A pipeline.
pub const STAGES: &str = include_str!("../data/stages.json");
/// Replicas with ZeRO-1.
pub const REPLICAS: &str = include_str!("../data/replicas.json");
/// CoLA-tiny on one device.
pub const TINY: &str = include_str!("../data/tiny.json");
