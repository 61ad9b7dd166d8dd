//! The time of an exact step of LORO, which the hosts of all stages run after the step phase.
//!
//! A host serves p threads and one link for each of its devices. With F floating-point operations in the pairs of a device, of
//! which the largest pair has f, and n bytes:
//!
//! ```text
//! read, write    n / copy bandwidth
//! sum            2·(g − 1)/g · n / network bandwidth      over a group of g devices
//! decompose      max(F / p, f) / rate of a thread         of the device with the most work
//! ```
//!
//! Stages run their exact steps at the same time, so that the slowest one counts. The next step follows all of them.

use std::collections::BTreeMap;

use narrows_plan::model::{Linear, Model};
use narrows_plan::program::{HostAction, HostInstr, OwnedPair, Program, StageProgram};
use narrows_plan::{Axis, Bytes, Context, Flops, Seconds};

use crate::Profile;
use crate::profile::{HostSpec, ProvenanceKind};

/// Factor either way between predicted and measured exact steps where the rates of the host are assumed. Assumed itself: processors
/// differ by as much.
const ASSUMED_ERROR: f64 = 3.0;

/// The same where a profile states the rates. Assumed: the rate of decompositions grows with their size by almost this factor.
const STATED_ERROR: f64 = 1.5;

/// Predicted exact steps of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExactStepTime {
    /// Steps from one exact step to the next.
    pub every: u64,
    /// Time that an exact step adds to its step.
    pub time: Seconds,
    /// Floating-point operations of all hosts.
    pub flops: Flops,
    /// Bytes between devices and hosts, of all devices.
    pub copied: Bytes,
    /// Provenance of the rates of hosts.
    pub rates: ProvenanceKind,
}

impl ExactStepTime {
    /// The exact steps of a program on a profile; `None` where the optimizer has none.
    pub fn of(program: &Program, profile: &Profile) -> Option<ExactStepTime> {
        let every = program.context.loro_every?.get();
        let host = profile.host();
        let devices = program.context.mesh.devices_per_stage();
        let stages = || program.stages.iter();
        let time = stages()
            .map(|stage| stage_time(stage, &host))
            .fold(Seconds(0.0), |a, b| if a < b { b } else { a });
        let pairs = stages().flat_map(|stage| &stage.exact_step.pairs);
        let flops = Flops(pairs.map(|pair| pair.decomposition_flops().0).sum());
        let copied: u64 = stages().map(|stage| copied_bytes(stage).0 * devices).sum();
        Some(ExactStepTime {
            every,
            time,
            flops,
            copied: Bytes(copied),
            rates: host.provenance.kind,
        })
    }

    /// Time that exact steps add to a step on average.
    pub fn per_step(&self) -> Seconds {
        self.time * (1.0 / self.every as f64)
    }

    /// 90 % interval of that time.
    pub fn per_step_interval(&self) -> [Seconds; 2] {
        let error = match self.rates {
            ProvenanceKind::Assumed => ASSUMED_ERROR,
            _ => STATED_ERROR,
        };
        [self.per_step() * (1.0 / error), self.per_step() * error]
    }
}

/// Work of the exact steps of a model under any plan, and the hosts that do it.
#[derive(Clone, Debug, PartialEq)]
pub struct ExactStepWork {
    flops: f64,
    elements: u64,
    host: HostSpec,
}

impl ExactStepWork {
    /// The work of all factor pairs of a model.
    pub fn of(model: &Model, profile: &Profile) -> ExactStepWork {
        let mut work = ExactStepWork { flops: 0.0, elements: 0, host: profile.host() };
        for (block, layer) in model.blocks.iter().zip(0..) {
            for (kind, linear) in block.linears() {
                let Linear { d_in, d_out, .. } = *linear;
                let Some(rank) = linear.rank() else { continue };
                let pair = OwnedPair { block: layer, linear: kind, d_in, rank, d_out, owner: 0 };
                work.flops += pair.decomposition_flops().0;
                work.elements += pair.elements();
            }
        }
        work
    }

    /// A lower bound on the time that exact steps add to a step on average, under all plans of a context: every thread
    /// decomposes, and stages have equal parts. Copies are not counted.
    pub fn least_per_step(&self, context: &Context) -> Seconds {
        let Some(every) = context.loro_every else { return Seconds(0.0) };
        let ExactStepWork { flops, elements, host } = self;
        let mesh = &context.mesh;
        let threads = mesh.devices_per_stage() * host.threads_per_device;
        let decomposed = flops / (threads as f64 * host.flops_per_s);
        let [tensor, data] = [Axis::Tensor, Axis::Data].map(|axis| mesh.group(axis));
        let factors = [tensor, context.shard_group()].map(HostAction::SumFactors);
        let sums = factors.into_iter().chain([tensor, data].map(HostAction::SumUpdates));
        let summed: f64 = sums.map(|action| sum_s(&action, *elements, host)).sum();
        Seconds((decomposed + summed) / (mesh.pipeline * every.get()) as f64)
    }
}

/// Seconds of a sum on pairs with so many elements; zero for other actions.
fn sum_s(action: &HostAction, elements: u64, host: &HostSpec) -> f64 {
    let (HostAction::SumFactors(group) | HostAction::SumUpdates(group)) = action else {
        return 0.0;
    };
    let share = 2.0 * (group.size - 1) as f64 / group.size as f64;
    share * action.summed_bytes(elements).as_f64() / host.network_bytes_per_s
}

fn stage_time(stage: &StageProgram, host: &HostSpec) -> Seconds {
    stage.exact_step.instrs.iter().map(|instr| instr_time(stage, instr, host)).sum()
}

fn instr_time(stage: &StageProgram, instr: &HostInstr, host: &HostSpec) -> Seconds {
    let pairs = stage.exact_step.pairs_of(instr);
    let seconds = match &instr.action {
        HostAction::Read(_) | HostAction::Write(_) => {
            instr_copied(stage, instr).as_f64() / host.copy_bytes_per_s
        }
        HostAction::SumFactors(_) | HostAction::SumUpdates(_) => {
            sum_s(&instr.action, pairs.iter().map(OwnedPair::elements).sum(), host)
        }
        HostAction::Decompose => {
            // Of each owner, the work of all pairs and of the largest.
            let mut work: BTreeMap<u64, [f64; 2]> = BTreeMap::new();
            for pair in pairs {
                let flops = pair.decomposition_flops().0;
                let [sum, largest] = work.entry(pair.owner).or_default();
                (*sum, *largest) = (*sum + flops, largest.max(flops));
            }
            let threads = host.threads_per_device as f64;
            let longest = work.values().map(|[sum, largest]| largest.max(sum / threads));
            longest.fold(0.0, f64::max) / host.flops_per_s
        }
        HostAction::Keep | HostAction::Place => 0.0,
    };
    Seconds(seconds)
}

/// Bytes that a device exchanges with its host in the exact step of its stage.
fn copied_bytes(stage: &StageProgram) -> Bytes {
    stage.exact_step.instrs.iter().map(|instr| instr_copied(stage, instr)).sum()
}

fn instr_copied(stage: &StageProgram, instr: &HostInstr) -> Bytes {
    match &instr.action {
        HostAction::Read(buffers) | HostAction::Write(buffers) => {
            buffers.iter().map(|buffer| stage.buffer(*buffer).extent.bytes()).sum()
        }
        _ => Bytes(0),
    }
}
