//! What a plan needs and nobody measured: the shapes that make its interval wider.

use narrows_plan::Kernel;
use narrows_plan::kernel::{Direction, Gemm};
use narrows_planner::Prediction;

use super::page::{Align, TextPage, percent, plural, thousands};

/// As many shapes are named; the others are counted.
const SHOWN: usize = 5;

/// Names the largest ones.
pub fn tell(page: &mut TextPage, prediction: &Prediction) {
    if !prediction.shapes_measured {
        page.line("No shape of this plan was measured on such hardware: the interval is assumed.");
        return;
    }
    let all = &prediction.unmeasured;
    if all.is_empty() {
        return;
    }
    let share: f64 = all.iter().map(|one| one.share).sum();
    page.heading("Shapes more than a factor of two from any that was measured");
    let row = |one: &narrows_cost_model::interval::UnmeasuredKernel| {
        let octaves = one.distance_octaves;
        let away = octaves.map_or("nothing like it".into(), |far| format!("{far:.1} octaves"));
        vec![name(&one.kernel), percent(one.share), away]
    };
    let rows: Vec<_> = all.iter().take(SHOWN).map(row).collect();
    let columns = [
        ("kernel", Align::Left),
        ("share of the time", Align::Right),
        ("nearest measured", Align::Left),
    ];
    page.table(&columns, &rows);
    let more = match all.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("and {} more; ", plural(more as u64, "shape")),
    };
    page.line(format!("{more}all together {} of the time", percent(share)));
}

/// A kernel in a few words.
fn name(kernel: &Kernel) -> String {
    match kernel {
        Kernel::Gemm(Gemm { m, n, k, batch, accumulate, .. }) => {
            let sizes = [m, k, n].map(|size| thousands(*size)).join(" × ");
            let many = if *batch > 1 { format!(", {batch} at once") } else { String::new() };
            let added = if *accumulate { ", added up" } else { "" };
            format!("product {sizes}{many}{added}")
        }
        Kernel::Attention(attention) => {
            let way = match attention.direction {
                Direction::Forward => "forward",
                Direction::Backward => "backward",
            };
            let (sequences, length) = (attention.sequences, thousands(attention.length));
            format!("attention {way}, {sequences} × {length} tokens, {} heads", attention.heads)
        }
        Kernel::Fused(pass) => {
            format!("pass ({}) over {}", pass.kind.name(), pass.traffic)
        }
        Kernel::Collective(collective) => {
            let kind = collective.kind.name().replace('_', "-");
            format!("{kind} of {} among {}", collective.payload, collective.group.size)
        }
        Kernel::Transfer(transfer) => format!("transfer of {}", transfer.bytes),
    }
}
