//! Pictures with captions.

use clap::ValueEnum;

use super::picture::Picture;

/// Kind of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlotKind {
    /// Step time by part, as stacked bars
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

    /// Kinds of the pictures of a sweep.
    pub const OF_SWEEP: &[PlotKind] = &[PlotKind::Lines, PlotKind::HeatMap];
    /// Kinds of the pictures of a sensitivity analysis.
    pub const OF_SENSITIVITY: &[PlotKind] = &[PlotKind::Tornado];

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
            PlotKind::StepTime => "Step time by part",
            PlotKind::Memory => "Memory",
            PlotKind::Pipeline => "Pipeline",
            PlotKind::Block => "One block",
            PlotKind::Roofline => "Roofline",
            PlotKind::Lines => "Step time",
            PlotKind::HeatMap => "Throughput",
            PlotKind::Tornado => "Sensitivity",
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
