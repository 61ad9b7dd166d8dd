//! Hardware profiles: the performance of a device, its links and its executors.
//!
//! A [`ProfileFile`] is the JSON form (`file.rs`). [`ProfileFile::resolve`] checks its numbers (`validation.rs`) and
//! returns a [`Profile`] (`checked.rs`), from which every price is finite. [`read`] makes a profile from text,
//! [`preset`] from a name. A profile describes hardware only: no number in it is indexed by a model or a strategy.

mod checked;
mod file;
mod measured;
mod presets;
mod provenance;
mod read;
mod refits;
mod validation;

pub use checked::Profile;
pub use file::{
    AttentionCurve, CollectiveLibrary, DeviceSpec, EfficiencyPoint, ErrorGrowth, ExecutorSpecs,
    FusedCurve, GemmCurve, GemmTile, HostSpec, InterNodeLinks, IntraNodeLinks, LaunchCosts,
    LinkSpec, MemoryReserve, NodeWiring, OverlapSpec, PeakFlops, ProfileFile, ProfileFormat,
};
pub use measured::{KernelMeasurements, MeasuredPoint, Repeatability};
pub use narrows_plan::Executor;
pub(crate) use presets::fitted_shapes;
pub use presets::{preset, preset_names};
pub use provenance::{Provenance, ProvenanceKind, RELATIVE_ERROR_MAX, RelativeError};
pub use read::{read, schema};
pub use refits::{BootstrapRefits, FittedParameter};
