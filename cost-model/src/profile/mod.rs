//! Hardware profiles: what a device, its links and its executors can do.
//!
//! A [`ProfileFile`] is the JSON form; a [`Profile`] is a file whose every number was validated, so that a price made
//! from it is finite. [`read`] makes the latter from text, [`preset`] from a name. A profile describes hardware only:
//! no number in it is indexed by a model or a strategy.

mod file;
mod measured;
mod presets;
mod provenance;
mod read;
mod refits;
mod resolve;
mod resolved;
mod shipped;

pub use file::{
    AttentionCurve, CollectiveLibrary, DeviceSpec, EfficiencyPoint, ExecutorSpecs, FusedCurve,
    GemmCurve, GemmTile, InterNodeLinks, IntraNodeLinks, LaunchCosts, LinkSpec, MemoryReserve,
    NodeWiring, PeakFlops, ProfileFile, ProfileFormat,
};
pub use measured::{KernelMeasurements, MeasuredPoint, Repeatability};
pub use narrows_plan::Executor;
pub use presets::preset;
pub use provenance::{Provenance, ProvenanceKind, RELATIVE_ERROR_MAX, RelativeError};
pub use read::{read, schema};
pub use refits::{BootstrapRefits, FittedParameter};
pub use resolved::Profile;
pub(crate) use shipped::fitted_shapes;
pub use shipped::preset_names;
