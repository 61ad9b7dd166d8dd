//! Kernels of a plan that are far from every measured shape, which widen the interval of the prediction.

use narrows_cost_model::interval::UnmeasuredKernel;
use narrows_plan::Kernel;
use narrows_plan::kernel::{Direction, Gemm};
use narrows_planner::Prediction;

use super::page::{Align, Page};
use crate::args::Detail;
use crate::text::{percent, plural, thousands, thousands_with_decimals};

/// Kernels that a summary lists.
const LISTED: usize = 5;

/// Lists the kernels with the largest share of the time.
pub fn unmeasured(page: &mut Page, prediction: &Prediction, detail: Detail) {
    if !prediction.shapes_measured {
        page.paragraph(
            "No kernel of this plan was measured on this hardware: the interval is assumed.",
        );
        return;
    }
    let kernels = &prediction.unmeasured;
    if kernels.is_empty() {
        return;
    }
    let share: f64 = kernels.iter().map(|kernel| kernel.share).sum();
    let rows = named_rows(kernels);
    page.paragraph(&format!(
        "{} of the kernel time is in {} more than 2× from any measured shape:",
        percent(share),
        plural(rows.len() as u64, "kernel"),
    ));
    let listed = match detail {
        Detail::Summary => LISTED,
        Detail::Full => usize::MAX,
    };
    let more = rows.len().saturating_sub(listed);
    let rows: Vec<_> = rows
        .into_iter()
        .take(listed)
        .map(|NamedRow { kernel, distance, share }| vec![kernel, percent(share), distance])
        .collect();
    let columns =
        [("kernel", Align::Left), ("share", Align::Right), ("nearest measured", Align::Left)];
    page.table(&columns, &rows);
    if more > 0 {
        page.line(format!("{} more: --details lists them", thousands(more as u64)));
    }
}

/// A row of the table: kernels of one name, whose shapes differ in what the name rounds or leaves out.
struct NamedRow {
    kernel: String,
    distance: String,
    share: f64,
}

/// The rows of kernels, in their order, with those of equal names and distances as one.
fn named_rows(kernels: &[UnmeasuredKernel]) -> Vec<NamedRow> {
    let mut rows: Vec<NamedRow> = vec![];
    for UnmeasuredKernel { kernel, share, distance_octaves, .. } in kernels {
        let (kernel, distance) = (name(kernel), distance(*distance_octaves));
        match rows.iter_mut().find(|row| row.kernel == kernel && row.distance == distance) {
            Some(row) => row.share += share,
            None => rows.push(NamedRow { kernel, distance, share: *share }),
        }
    }
    rows.sort_by(|one, other| other.share.total_cmp(&one.share));
    rows
}

/// The factor to the nearest measured shape.
fn distance(octaves: Option<f64>) -> String {
    match octaves.map(f64::exp2) {
        None => "none of this kind".into(),
        Some(factor) if factor < 10.0 => format!("{factor:.1}× away"),
        Some(factor) => format!("{}× away", thousands_with_decimals(factor, 0)),
    }
}

/// A kernel in a few words.
pub fn name(kernel: &Kernel) -> String {
    match kernel {
        Kernel::Gemm(Gemm { m, n, k, batch, accumulate, residual, .. }) => {
            let sizes = [m, n, k].map(|size| thousands(*size)).join(" × ");
            let batch = if *batch > 1 { format!(", batch {batch}") } else { String::new() };
            let accumulate = match (accumulate, residual) {
                (_, true) => ", residual",
                (true, false) => ", accumulate",
                (false, false) => "",
            };
            format!("GEMM {sizes}{batch}{accumulate}")
        }
        Kernel::Attention(attention) => {
            let direction = match attention.direction {
                Direction::Forward => "forward",
                Direction::Backward => "backward",
            };
            let (sequences, length) = (attention.sequences, thousands(attention.length));
            let window = match attention.window {
                Some(window) => format!(", window {}", thousands(window)),
                None => String::new(),
            };
            let ring = match attention.rotation() {
                Some(ring) => format!(", ring of {}", ring.size),
                None => String::new(),
            };
            format!(
                "attention {direction}, {sequences} × {length} tokens{window}{ring}, {} heads",
                attention.heads
            )
        }
        Kernel::Fused(fused) => {
            format!("{} over {}", fused.kind.name().replace('_', " "), fused.traffic)
        }
        Kernel::Collective(collective) => {
            let kind = collective.kind.name().replace('_', "-");
            format!("{kind} of {} over {} devices", collective.payload, collective.group.size)
        }
        Kernel::Transfer(transfer) => format!("P2P transfer of {}", transfer.bytes),
    }
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::interval::UnmeasuredKernel;
    use narrows_plan::kernel::{Kernel, Transfer};
    use narrows_plan::{Axis, Bytes, DeviceGroup};

    use super::{distance, named_rows};

    #[test]
    fn kernels_of_one_name_are_one_row() {
        let of = |bytes: u64, share: f64| {
            let group = DeviceGroup { axis: Axis::Pipeline, size: 2, stride: 1 };
            let kernel = Kernel::Transfer(Transfer { bytes: Bytes(bytes), group });
            UnmeasuredKernel { kernel, share, distance_octaves: None }
        };
        let mib = Bytes::MIB;
        let rows = named_rows(&[of(4 * mib, 0.3), of(mib, 0.2), of(mib + 1, 0.2)]);
        let rows: Vec<_> = rows.iter().map(|row| (row.kernel.as_str(), row.share)).collect();
        assert_eq!(rows, [("P2P transfer of 1.0 MiB", 0.4), ("P2P transfer of 4.0 MiB", 0.3)]);
    }

    #[test]
    fn distances_are_factors() {
        assert_eq!(distance(Some(5.0)), "32× away");
        assert_eq!(distance(Some(1.5)), "2.8× away");
        assert_eq!(distance(Some(21.0)), "2,097,152× away");
        assert_eq!(distance(None), "none of this kind");
    }
}
