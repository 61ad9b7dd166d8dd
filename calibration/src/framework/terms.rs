//! The shares of a decoder's step time that its terms have.

use narrows_cost_model::Profile;
use narrows_plan::Mesh;

use super::file::FrameworkTable;
use super::step::decoder_step_time_s;
use crate::measurements::{DecoderModel, TrainingStep};
use crate::step_terms::{StepTerm, TermShare, probed_shares};

/// The shares of all terms.
pub(crate) fn decoder_term_shares(
    table: &FrameworkTable,
    model: DecoderModel,
    step: &TrainingStep,
    mesh: Mesh,
    profile: &Profile,
) -> Vec<TermShare> {
    let time_s = |table: &FrameworkTable| decoder_step_time_s(table, model, step, mesh, profile);
    probed_shares(time_s(table), |term, factor| time_s(&scaled(table, term, factor)))
}

/// A table whose prices of one term are multiplied by `factor`.
fn scaled(table: &FrameworkTable, term: StepTerm, factor: f64) -> FrameworkTable {
    let mut table = table.clone();
    match term {
        StepTerm::Gemm => table.factors.gemm *= factor,
        StepTerm::Attention => {
            table.attention.forward /= factor;
            table.attention.backward /= factor;
        }
        StepTerm::Memory => table.factors.memory *= factor,
        StepTerm::Collective => table.factors.collective *= factor,
        StepTerm::Host => {
            table.host.operator_s *= factor;
            table.host.block_s *= factor;
            table.host.step_s *= factor;
            table.device.operator_s *= factor;
        }
    }
    table
}
