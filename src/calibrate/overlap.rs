//! Steps of CPU devices with collectives beside computation, and the same steps in order.
//!
//! Two devices on a data axis reduce gradients beside the last backward pass. Steps of both kinds alternate, so that other
//! load of the machine affects both equally. A collective that waits for its other members yields its thread to computation:
//! its time is that of the member that came last, and ends with it on every device.

use std::ops::Range;
use std::time::Duration;

use narrows_calibration::fit::OverlappedInstructions;
use narrows_cpu::{CollectiveOrder, CpuOptions};
use narrows_plan::program::Action;
use narrows_runtime::session::{Session, StepInput};
use narrows_runtime::{CounterRng, DeviceId, InstructionSpan, Optimizer, scheduled_instructions};

use super::PlannedBenchmark;
use super::benchmarks::{BenchmarkExtent, OVERLAP_DEVICES};
use crate::errors::{CommandResult, Failure};

/// Steps of either kind that are not timed.
const WARM_UP_STEPS: usize = 2;

/// Begin and end of an instruction in seconds.
type Span = Range<f64>;

/// Runs pairs of steps of a benchmark in both orders, on devices that share `threads` threads.
///
/// # Errors
/// A step that cannot be executed.
pub fn overlapped_instructions(
    benchmark: &PlannedBenchmark,
    threads: u64,
    extent: BenchmarkExtent,
) -> CommandResult<Vec<OverlappedInstructions>> {
    let pairs = match extent {
        BenchmarkExtent::Quick => 10,
        BenchmarkExtent::Full => 40,
    };
    let failure = |error| Failure::execution(&error);
    let model = &benchmark.benchmark.request.model;
    let open = |collective_order| {
        let threads = (threads / OVERLAP_DEVICES).max(1) as usize;
        let options = CpuOptions { collective_order, ..CpuOptions::new(threads) };
        let mut session = options.open(model, benchmark.program.clone(), None)?;
        session.initialise_for_measurement(model)?;
        session.record_instruction_spans();
        Ok(session)
    };
    let mut in_order = open(CollectiveOrder::InOrder).map_err(failure)?;
    let mut overlapped = open(CollectiveOrder::Overlapped).map_err(failure)?;
    // Devices that differ along the data axis alone have the same stage.
    let stage = &benchmark.program.program().stages[0];
    let is_collective: Vec<bool> = scheduled_instructions(stage)
        .map(|scheduled| matches!(scheduled.instr.action, Action::Collective(_)))
        .collect();
    let mut overlapped_of_pairs = vec![];
    for pair in 0..WARM_UP_STEPS + pairs {
        let alone = step_spans(&mut in_order).map_err(failure)?;
        let beside = step_spans(&mut overlapped).map_err(failure)?;
        if pair >= WARM_UP_STEPS {
            overlapped_of_pairs.push(overlapped_of_pair(&is_collective, &alone, &beside));
        }
    }
    Ok(overlapped_of_pairs)
}

/// Runs a step. Returns the spans of each device, in the order of its instructions.
fn step_spans(session: &mut Session) -> Result<Vec<Vec<Span>>, narrows_runtime::RunError> {
    let program = session.program();
    let (work, vocab) = (program.context.workload, program.constants.vocab);
    let stream = CounterRng::new(1, "tokens");
    let count = work.global_batch * work.sequence_length;
    let ids: Vec<u32> = (0..=count).map(|n| (stream.bits(n) % vocab) as u32).collect();
    let input = StepInput { tokens: &ids[..count as usize], targets: &ids[1..] };
    session.step(&Optimizer::new(1e-4, 1, 1_000_000), input)?;
    let seconds = |time: Duration| time.as_secs_f64();
    let span = |span: &InstructionSpan| seconds(span.start)..seconds(span.end);
    let of_device = |device| session.instruction_spans(DeviceId(device)).iter().map(span).collect();
    Ok(session.devices().map(of_device).collect())
}

/// The instructions that overlapped in a step, with their times in a step in order. Steps have spans by device and
/// instruction.
fn overlapped_of_pair(
    is_collective: &[bool],
    in_order: &[Vec<Span>],
    overlapped: &[Vec<Span>],
) -> OverlappedInstructions {
    let mut sums = OverlappedInstructions::default();
    for device in 0..overlapped.len() {
        let [alone, spans] =
            [in_order, overlapped].map(|step| active_spans(is_collective, step, device));
        for (index, of_own) in is_collective.iter().enumerate() {
            let others =
                spans.iter().zip(is_collective).filter(|(_, of_other)| *of_other != of_own);
            let beside = others.map(|(other, _)| intersection_s(&spans[index], other));
            let beside_s: f64 = beside.sum();
            if beside_s <= 0.0 {
                continue;
            }
            let times = if *of_own { &mut sums.collectives } else { &mut sums.computation };
            times.alone_s += length_s(&alone[index]);
            times.beside_s += beside_s;
            times.rest_s += length_s(&spans[index]) - beside_s;
        }
    }
    sums
}

/// The spans of a device in which its instructions occupy threads.
fn active_spans(is_collective: &[bool], step: &[Vec<Span>], device: usize) -> Vec<Span> {
    let active = |(index, span): (usize, &Span)| match is_collective[index] {
        true => span.end - active_s(step, index)..span.end,
        false => span.clone(),
    };
    step[device].iter().enumerate().map(active).collect()
}

/// The time of a collective on the device that comes last.
fn active_s(step: &[Vec<Span>], index: usize) -> f64 {
    step.iter().map(|spans| length_s(&spans[index])).fold(f64::INFINITY, f64::min)
}

fn length_s(span: &Span) -> f64 {
    span.end - span.start
}

fn intersection_s(a: &Span, b: &Span) -> f64 {
    (a.end.min(b.end) - a.start.max(b.start)).max(0.0)
}

#[cfg(test)]
mod tests {
    use narrows_calibration::fit::OverlappedTimes;

    use super::overlapped_of_pair;

    /// Two computations of 2 s, of which a collective of 1 s slows the second one by 1.5 and is slowed by 2: it takes 2 s, in
    /// which the computation does 4/3 s of its work. One device comes 1 s late to the collective.
    #[test]
    fn waits_are_no_part_of_a_collective() {
        let is_collective = [false, true, false];
        let in_order = [vec![0.0..2.0, 2.0..4.0, 4.0..6.0], vec![0.0..3.0, 3.0..4.0, 4.0..6.0]];
        let end = 5.0 + 2.0 / 3.0;
        let overlapped = [vec![0.0..2.0, 2.0..5.0, 3.0..end], vec![0.0..3.0, 3.0..5.0, 3.0..end]];
        let sums = overlapped_of_pair(&is_collective, &in_order, &overlapped);
        let slowdown = |times: OverlappedTimes| times.beside_s / (times.alone_s - times.rest_s);
        assert!((slowdown(sums.computation) - 1.5).abs() < 1e-9, "{sums:?}");
        assert!((slowdown(sums.collectives) - 2.0).abs() < 1e-9, "{sums:?}");
    }
}
