//! The text form of programs: one line per instruction, for reading, diffs and golden tests.

use std::fmt::{self, Write};
use std::ops::Range;

use super::{
    Access, Action, GatherBucket, GradientBucket, Instr, InstrOrigin, Phase, Program, StageProgram,
};

impl Action {
    /// A short name: `gemm`, `attention`, `all_reduce`, `norm`, …
    pub fn name(&self) -> &'static str {
        match self {
            Action::Gemm(_) => "gemm",
            Action::Attention(_) => "attention",
            Action::Fused(op) => op.describe().0,
            Action::Collective(collective) => collective.kind().name(),
            Action::Send(_) => "send",
            Action::Receive(_) => "receive",
        }
    }
}

impl fmt::Display for InstrOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Padding applies to the whole text, as for a string.
        match self.block {
            Some(block) => f.pad(&format!("layer {block} {}", self.op)),
            None => f.pad(&self.op),
        }
    }
}

impl From<&str> for InstrOrigin {
    /// An origin outside the blocks.
    fn from(op: &str) -> InstrOrigin {
        InstrOrigin { block: None, op: op.into() }
    }
}

impl StageProgram {
    fn line(&self, instr: &Instr) -> String {
        let list = |side: &[Access]| -> String {
            let names: Vec<&str> =
                side.iter().map(|a| self.buffer(a.buffer).name.as_str()).collect();
            names.join(", ")
        };
        let mut line =
            format!("{} = {}({})", list(&instr.writes), instr.action.name(), list(&instr.reads));
        match &instr.action {
            Action::Gemm(gemm) => {
                let accumulate = if gemm.accumulate { " accumulate" } else { "" };
                let _ =
                    write!(line, " [{}×{}×{}; {}]{accumulate}", gemm.m, gemm.n, gemm.k, gemm.batch);
            }
            Action::Collective(collective) => {
                let _ = write!(
                    line,
                    " [{}: {} → {}]",
                    collective.axis.name(),
                    collective.from,
                    collective.to
                );
                if instr.overlapped_instrs > 0 {
                    let _ = write!(line, " overlapping the next {}", instr.overlapped_instrs);
                }
            }
            Action::Send(p2p) | Action::Receive(p2p) => {
                let _ = write!(line, " [stage {}]", p2p.peer_stage);
            }
            Action::Attention(attention) => {
                if let Some(ring) = attention.rotation() {
                    let _ = write!(line, " [{} ring of {}]", ring.axis.name(), ring.size);
                }
            }
            _ => {}
        }
        line
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, stage) in self.stages.iter().enumerate() {
            let in_flight = |chunk: usize| stage.microbatches_in_flight(chunk).to_string();
            let in_flight: Vec<String> = (0..stage.chunks.len()).map(in_flight).collect();
            let in_flight = in_flight.join(" + ");
            writeln!(f, "stage {index}: arena {}, {in_flight} in flight", stage.arena)?;
            for at in stage.chunk_phases() {
                let instructions = stage.instructions(at);
                if at.phase == Phase::WeightGradient && instructions.is_empty() {
                    continue;
                }
                writeln!(f, "  {at}:")?;
                for instr in instructions {
                    writeln!(f, "    {:<24} {}", instr.origin, stage.line(instr))?;
                }
            }
            for GradientBucket { after, reductions } in &stage.gradient_buckets {
                let Range { start, end } = reductions;
                writeln!(
                    f,
                    "  step {start}..{end}: during the last pass, after its first {after}"
                )?;
            }
            for GatherBucket { before, gathers } in &stage.gather_buckets {
                let Range { start, end } = gathers;
                writeln!(
                    f,
                    "  step {start}..{end}: during the next first pass, before its instruction {before}"
                )?;
            }
            if !stage.exact_step.is_empty() {
                writeln!(f, "  exact step:")?;
            }
            for instr in &stage.exact_step.instrs {
                writeln!(f, "    {:<24} {}", stage.exact_step.origin(instr), instr.action.name())?;
            }
        }
        Ok(())
    }
}
