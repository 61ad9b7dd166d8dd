//! Collectives as the members of a device group execute them together, in the order of their places.

use std::ops::Range;

use narrows_cuda::{NcclCollective, RingShift};
use narrows_plan::program::{CollectiveFunction, Reduction};

/// Results of a collective on its members. Sums are in f32 and rounded once. In place, each member's part lies at its
/// place in the whole.
pub fn collective_results(
    collective: &NcclCollective,
    sources: &[Vec<f32>],
    in_place: bool,
) -> Vec<Vec<f32>> {
    let members = sources.len();
    let part = sources[0].len() / members;
    let local = |rank: usize| rank * part..(rank + 1) * part;
    let reduced = |combine: fn(f32, f32) -> f32| {
        let mut reduced = sources[0].clone();
        for source in &sources[1..] {
            reduced.iter_mut().zip(source).for_each(|(to, x)| *to = combine(*to, *x));
        }
        reduced
    };
    let for_each_rank = |result: &dyn Fn(usize) -> Vec<f32>| (0..members).map(result).collect();
    match collective.function {
        CollectiveFunction::AllReduce(Reduction::Sum) => vec![reduced(|a, b| a + b); members],
        CollectiveFunction::AllReduce(Reduction::Maximum) => vec![reduced(f32::max); members],
        CollectiveFunction::ReduceScatter => {
            let sum = reduced(|a, b| a + b);
            for_each_rank(&|rank| {
                if !in_place {
                    return sum[local(rank)].to_vec();
                }
                let mut result = sources[rank].clone();
                result[local(rank)].copy_from_slice(&sum[local(rank)]);
                result
            })
        }
        CollectiveFunction::AllGather if in_place => {
            let parts = sources.iter().enumerate();
            let whole: Vec<f32> =
                parts.flat_map(|(rank, source)| source[local(rank)].to_vec()).collect();
            vec![whole; members]
        }
        CollectiveFunction::AllGather => vec![sources.concat(); members],
        CollectiveFunction::AllToAll => for_each_rank(&|rank| {
            sources.iter().flat_map(|source| source[local(rank)].to_vec()).collect()
        }),
    }
}

/// Copies what each member sends to the arena of the next one.
pub fn run_shift(shifts: &[RingShift], mut arenas: Vec<&mut [u8]>) {
    let indices = |range: &Range<u64>| range.start as usize..range.end as usize;
    for port in 0..shifts[0].operands.len() {
        let sources = shifts.iter().map(|shift| &shift.operands[port].0).zip(&arenas);
        let mut sent: Vec<Vec<u8>> =
            sources.map(|(source, arena)| arena[indices(source)].to_vec()).collect();
        sent.rotate_right(1);
        for ((shift, arena), arrived) in shifts.iter().zip(&mut arenas).zip(sent) {
            arena[indices(&shift.operands[port].1)].copy_from_slice(&arrived);
        }
    }
}
