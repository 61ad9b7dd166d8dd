//! Hardware profiles: the performance of a device, its links and its executors.
//!
//! A [`ProfileFile`] is the JSON form (`file.rs`, `links.rs`, `executors.rs`). [`ProfileFile::resolve`] checks its numbers (`validation.rs`) and
//! returns a [`Profile`] (`checked.rs`), from which every price is finite. [`read`] makes a profile from text,
//! [`preset`] from a name. A profile describes hardware only: no number in it is indexed by a model or a strategy.

mod checked;
mod executors;
mod file;
mod links;
mod measured;
mod presets;
mod provenance;
mod read;
mod refits;
mod validation;

pub use checked::Profile;
pub use executors::{ExecutorSpecs, LaunchCosts};
pub use file::{
    AttentionCurve, DeviceSpec, EfficiencyPoint, ErrorGrowth, FusedCurve, GemmCurve, GemmTile,
    HostSpec, MemoryReserve, PeakFlops, ProfileFile, ProfileFormat,
};
pub use links::{
    CollectiveLibrary, InterNodeLinks, IntraNodeLinks, LinkSpec, NodeWiring, OverlapSpec,
};
pub use measured::{KernelMeasurements, MeasuredPoint, Repeatability};
pub use narrows_plan::Executor;
pub(crate) use presets::fitted_shapes;
pub use presets::{preset, preset_names};
pub use provenance::{Provenance, ProvenanceKind, RELATIVE_ERROR_MAX, RelativeError};
pub use read::{read, schema};
pub use refits::{BootstrapRefits, FittedParameter};
pub use validation::DOLLARS_PER_HOUR;
