//! The text form of programs: one line an instruction, for reading, diffing and golden tests.

use std::fmt::{self, Write};

use super::{Access, Action, Instr, InstrOrigin, Phase, Program, StageProgram};

impl Action {
    /// A short name: `gemm`, `attention`, `all_reduce`, `norm`, …
    pub fn name(&self) -> &'static str {
        match self {
            Action::Gemm(_) => "gemm",
            Action::Attention(_) => "attention",
            Action::Fused(pass) => pass.describe().0,
            Action::Collective(collective) => collective.kind.name(),
            Action::Send(_) => "send",
            Action::Receive(_) => "receive",
        }
    }
}

impl fmt::Display for InstrOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Padding applies to the whole, as for a string.
        match self.block {
            Some(block) => f.pad(&format!("layer {block} {}", self.op)),
            None => f.pad(&self.op),
        }
    }
}

impl From<&str> for InstrOrigin {
    /// An origin in no block.
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
            Action::Gemm(p) => {
                let plus = if p.accumulate { " accumulate" } else { "" };
                let _ = write!(line, " [{}×{}×{}; {}]{plus}", p.m, p.n, p.k, p.batch);
            }
            Action::Collective(e) => {
                let _ = write!(line, " [{}: {} → {}]", e.axis.name(), e.from, e.to);
            }
            Action::Send(p2p) | Action::Receive(p2p) => {
                let _ = write!(line, " [stage {}]", p2p.peer_stage);
            }
            _ => {}
        }
        line
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, stage) in self.stages.iter().enumerate() {
            writeln!(f, "stage {index}: arena {}, {} in flight", stage.arena, stage.slots)?;
            for (name, phase) in
                [("forward", Phase::Forward), ("backward", Phase::Backward), ("step", Phase::Step)]
            {
                writeln!(f, "  {name}:")?;
                for instr in stage.instructions(phase) {
                    writeln!(f, "    {:<24} {}", instr.origin, stage.line(instr))?;
                }
            }
        }
        Ok(())
    }
}
