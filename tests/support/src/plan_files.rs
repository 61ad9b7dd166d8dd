//! Plan files of small models, as text.

/// CoLA-60M under BTP on four devices.
pub const BTP: &str = include_str!("../data/btp.json");
/// CoLA-60M on two stages of two devices.
pub const STAGES: &str = include_str!("../data/stages.json");
/// CoLA-60M on two replicas of two devices with ZeRO-1.
pub const REPLICAS: &str = include_str!("../data/replicas.json");
/// CoLA-tiny on two stages of two devices.
pub const TINY: &str = include_str!("../data/tiny.json");
