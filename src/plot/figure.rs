//! Pictures with captions.

use clap::ValueEnum;

use super::picture::Picture;

/// Kind of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlotKind {
    /// Step time by part, as stacked bars; of measurements, measured and predicted
    StepTime,
    /// Memory of each pipeline stage; of a sweep, memory against step time
    Memory,
    /// Passes of each pipeline stage over the time of a step
    Pipeline,
    /// One block as a graph, with layouts and collectives
    Block,
    /// FLOP/s of the GEMMs of a block against their arithmetic intensity
    Roofline,
    /// Step time of a sweep over its numbers
    Lines,
    /// Throughput of a sweep of two fields, as coloured cells
    HeatMap,
    /// Elasticities of the step time, as bars to both sides
    Tornado,
    /// Strong and weak scaling of a sweep of devices, with efficiency
    Scaling,
    /// Step time of a sweep, with the places where the fastest line changes
    Crossover,
    /// FLOP/s of measured GEMMs and of their predictions
    GemmEfficiency,
    /// Times of measured collectives and of their predictions, with their bytes
    Communication,
}

impl PlotKind {
    /// Kinds of the pictures of a plan.
    pub const OF_PLAN: &[PlotKind] = &[
        PlotKind::StepTime,
        PlotKind::Memory,
        PlotKind::Pipeline,
        PlotKind::Block,
        PlotKind::Roofline,
    ];
    /// Kinds of the pictures of several plans.
    pub const OF_PLANS: &[PlotKind] = &[PlotKind::StepTime];

    /// Kinds of the pictures of a sensitivity analysis.
    pub const OF_SENSITIVITY: &[PlotKind] = &[PlotKind::Tornado];

    /// Kinds of the pictures of a sweep.
    pub const OF_SWEEP: &[PlotKind] = &[
        PlotKind::Lines,
        PlotKind::HeatMap,
        PlotKind::Scaling,
        PlotKind::Crossover,
        PlotKind::Memory,
    ];

    /// Kinds of the pictures of measurements.
    pub const OF_MEASUREMENTS: &[PlotKind] =
        &[PlotKind::StepTime, PlotKind::GemmEfficiency, PlotKind::Communication];

    /// The name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
    }

    /// The names of kinds, for messages.
    pub fn names(kinds: &[PlotKind]) -> String {
        kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
    }

    /// The heading of a picture.
    pub fn title(self) -> &'static str {
        match self {
            PlotKind::StepTime => "Step time",
            PlotKind::Memory => "Memory",
            PlotKind::Pipeline => "Pipeline",
            PlotKind::Block => "One block",
            PlotKind::Roofline => "Roofline",
            PlotKind::Lines => "Step time of each point",
            PlotKind::HeatMap => "Throughput",
            PlotKind::Tornado => "Sensitivity",
            PlotKind::Scaling => "Scaling",
            PlotKind::Crossover => "Crossover",
            PlotKind::GemmEfficiency => "Efficiency of GEMMs",
            PlotKind::Communication => "Communication",
        }
    }
}

/// A picture with a sentence about it.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Kind of the picture.
    pub kind: PlotKind,
    /// The picture.
    pub picture: Picture,
    /// The sentence.
    pub caption: String,
}

impl Figure {
    /// The figure of a picture, if there is one.
    pub fn of(kind: PlotKind, picture: Option<Picture>, caption: &str) -> Option<Figure> {
        picture.map(|picture| Figure { kind, picture, caption: caption.to_owned() })
    }
}
