//! The operands of AdamW, parameter by parameter.

use std::iter;

use super::{Access, Instr};

/// Operands read for a parameter: the gradient, its moments, and the master copy or an fp32 weight.
pub(super) const READS_OF_UPDATE: usize = 4;

/// One parameter of an AdamW instruction. With ZeRO, all operands but the zeroed gradient are the part of the parameter that
/// a replica updates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterUpdate<'a> {
    /// The gradient that is read.
    pub gradient: Access,
    /// The weight.
    pub weight: Access,
    /// The gradient that is zeroed, whole; `None` where the next step overwrites it.
    pub zeroed: Option<Access>,
    /// The moments and, of a weight in a format narrower than fp32, the master copy.
    pub states: &'a [Access],
}

impl Instr {
    /// The parameters that AdamW updates, in order; `None`, and the end, where the next operands are not those of an update
    /// in place.
    pub fn parameter_updates(&self) -> impl Iterator<Item = Option<ParameterUpdate<'_>>> {
        let mut rest = (&self.reads[..], &self.writes[..]);
        iter::from_fn(move || match rest {
            ([], []) => None,
            (reads, writes) => {
                let first = first_update(reads, writes);
                rest = first.map_or((&[], &[]), |(_, rest)| rest);
                Some(first.map(|(update, _)| update))
            }
        })
    }
}

/// Operands read, and operands written.
type Operands<'a> = (&'a [Access], &'a [Access]);

/// The first parameter, and the operands of the others.
fn first_update<'a>(
    reads: &'a [Access],
    writes: &'a [Access],
) -> Option<(ParameterUpdate<'a>, Operands<'a>)> {
    let (read, reads) = reads.split_at_checked(READS_OF_UPDATE)?;
    let (gradient, states) = (read[0], &read[1..]);
    let (weight, written) = writes.split_first()?;
    let (zeroed, written) = match written.split_first() {
        Some((first, written)) if first.buffer == gradient.buffer => (Some(*first), written),
        _ => (None, written),
    };
    // An fp32 weight is read in place, and has no master copy.
    let states = states.strip_suffix(&[*weight]).unwrap_or(states);
    let (updated, writes) = written.split_at_checked(states.len())?;
    let update = ParameterUpdate { gradient, weight: *weight, zeroed, states };
    (updated == states).then_some((update, (reads, writes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::program::{Action, BufferId, Extent, FusedOp};

    fn access(buffer: u32, dtype: DType) -> Access {
        Access { buffer: BufferId(buffer), extent: Extent::flat(8, dtype) }
    }

    /// Two parameters: an fp32 weight whose gradient is overwritten, and a bf16 weight whose gradient is zeroed.
    fn instr() -> Instr {
        let fp32 = |buffer| access(buffer, DType::F32);
        let narrow = access(14, DType::Bf16);
        let reads = [0, 1, 2, 3, 10, 11, 12, 13].map(fp32).to_vec();
        let (first, second) = ([3, 1, 2].map(fp32), [10, 11, 12, 13].map(fp32));
        let writes = [&first[..], &[narrow], &second].concat();
        let action = Action::Fused(FusedOp::AdamW);
        Instr { action, reads, writes, origin: "a test".into(), overlapped_instrs: 0 }
    }

    #[test]
    fn updates_have_their_own_operands() {
        let instr = instr();
        let updates: Option<Vec<ParameterUpdate>> = instr.parameter_updates().collect();
        let [first, second] = updates.unwrap().try_into().unwrap();
        let reads = &instr.reads;
        assert_eq!((first.gradient, first.weight), (reads[0], reads[3]));
        assert_eq!((first.zeroed, first.states), (None, &reads[1..3]));
        assert_eq!((second.gradient, second.weight), (reads[4], access(14, DType::Bf16)));
        assert_eq!((second.zeroed, second.states), (Some(reads[4]), &reads[5..8]));
    }

    #[test]
    fn missing_and_exchanged_operands_end_the_updates() {
        let is_refused = |instr: &Instr| {
            let count = instr.reads.len() + 2;
            let updates: Vec<_> = instr.parameter_updates().take(count).collect();
            updates.last().is_some_and(Option::is_none)
        };
        for at in 0..8 {
            let (mut without_read, mut exchanged) = (instr(), instr());
            without_read.reads.remove(at);
            assert!(is_refused(&without_read), "without operand {at}");
            exchanged.writes.swap(at, (at + 1) % 8);
            assert!(is_refused(&exchanged), "results {at} and the next exchanged");
        }
        for at in [0, 1, 2, 5, 6, 7] {
            let mut without_write = instr();
            without_write.writes.remove(at);
            assert!(is_refused(&without_write), "without result {at}");
        }
    }
}
