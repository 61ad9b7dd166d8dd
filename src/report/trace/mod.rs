//! Trace events in the format of Perfetto and chrome://tracing.
//!
//! A process of the trace is a device, or in the trace of a run a stage of the predicted step, whose devices are equal.
//! A process has five threads: the step and its passes, compute instructions, communication, the collectives of buckets
//! (gradient reductions during the last backward pass, and gathers of weights during the first forward pass), and overlapped
//! collectives of sharded parameters in passes. Times are microseconds from the start of the first traced step, which is also the start of the predicted step.

mod extent;
mod file;

use std::ops::Range;
use std::time::Duration;

use narrows_cost_model::{BucketSpan, StreamPrices, Timeline, instruction_spans, stage_sync_group};
use narrows_plan::Kernel;
use narrows_plan::program::{Action, Instr, MicrobatchPass, Phase, Program, StageProgram};
use narrows_runtime::{
    DeviceId, InstructionSpan, ScheduledInstruction, TimeCategory, Trainer, scheduled_instructions,
};
use serde_json::{Map, Value, json};

use super::kernels;

pub use extent::TraceExtent;
use file::TraceEvent;
pub use file::TraceText;

const PASSES: u64 = 0;
const COMPUTE: u64 = 1;
const COMMUNICATION: u64 = 2;
const BUCKETS: u64 = 3;
const SHARDED_PARAMETERS: u64 = 4;

/// Number of the first process of the predicted step.
const PREDICTED: u64 = 1_000_000;

/// The measured times of a step.
pub struct MeasuredTrace {
    step: u64,
    /// Spans of the instructions, by device.
    spans: Vec<Vec<InstructionSpan>>,
}

/// The process and the step that events belong to.
#[derive(Clone, Copy)]
struct TraceProcess {
    pid: u64,
    step: u64,
    /// Whether stages have several model chunks, which events then name.
    has_chunks: bool,
}

impl MeasuredTrace {
    /// The last completed step of a run.
    pub fn of(trainer: &Trainer, step: u64) -> MeasuredTrace {
        let session = trainer.session();
        let devices = (0..session.program().context.mesh.devices()).map(DeviceId);
        MeasuredTrace {
            step,
            spans: devices.map(|device| session.instruction_spans(device).to_vec()).collect(),
        }
    }

    /// Time at which the last device finished the step.
    fn end(&self) -> Duration {
        let last = self.spans.iter().filter_map(|spans| spans.last());
        last.map(|span| span.end).max().unwrap_or_default()
    }
}

/// Adds the events of measured steps, one after the other.
pub fn add_measured_steps(trace: &mut TraceText, program: &Program, steps: &[MeasuredTrace]) {
    let mesh = program.context.mesh;
    for device in (0..mesh.devices()).map(DeviceId) {
        let stage = device.stage(&mesh);
        let name = format!("measured: device {} (stage {stage})", device.0);
        trace.extend(&metadata(device.0, &name));
        let mut begin = Duration::ZERO;
        for measured in steps {
            let process = TraceProcess::new(device.0, measured.step, program);
            let spans = measured.spans[device.0 as usize]
                .iter()
                .map(|span| (micros(begin + span.start), micros(begin + span.end)));
            let scheduled = scheduled_instructions(&program.stages[stage]).zip(spans);
            let end = micros(begin + measured.end());
            let in_step_phase = outside_buckets(&program.stages[stage]);
            process.step(scheduled, in_step_phase, (micros(begin), end), trace);
            begin += measured.end();
        }
    }
}

/// Adds the events of the predicted step, with a process for each stage.
pub fn add_predicted_step(
    trace: &mut TraceText,
    program: &Program,
    timeline: &Timeline,
    prices: StreamPrices,
) {
    for stage in 0..program.stages.len() {
        let process = TraceProcess::new(PREDICTED + stage as u64, 0, program);
        trace.extend(&metadata(process.pid, &format!("predicted: each device of stage {stage}")));
        process.simulated_step(program, stage, timeline, prices, |_| true, trace);
    }
}

/// Adds the events of the predicted step within an extent, with a process for each device.
pub fn add_simulated_step(
    trace: &mut TraceText,
    program: &Program,
    extent: &TraceExtent,
    timeline: &Timeline,
    prices: StreamPrices,
) {
    for device in &extent.devices {
        let stage = device.stage(&program.context.mesh);
        let process = TraceProcess::new(device.0, 0, program);
        trace.extend(&metadata(device.0, &format!("device {} (stage {stage})", device.0)));
        process.simulated_step(
            program,
            stage,
            timeline,
            prices,
            |pass| extent.contains(pass),
            trace,
        );
    }
}

impl TraceProcess {
    fn new(pid: u64, step: u64, program: &Program) -> TraceProcess {
        TraceProcess { pid, step, has_chunks: program.context.chunks > 1 }
    }

    /// Adds the events of the predicted step of a stage, of the passes that are selected.
    fn simulated_step(
        self,
        program: &Program,
        stage: usize,
        timeline: &Timeline,
        prices: StreamPrices,
        is_selected: impl Fn(MicrobatchPass) -> bool,
        trace: &mut TraceText,
    ) {
        let stage_program = &program.stages[stage];
        let of_stage = |bucket: &&BucketSpan| bucket.stage == stage;
        let is_overlapped = timeline.buckets.iter().chain(&timeline.gathers).any(|b| of_stage(&b));
        let in_step_phase = match is_overlapped {
            true => outside_buckets(stage_program),
            false => 0..stage_program.step.len(),
        };
        // Collectives and the pass beside them slow each other; each is drawn as if all of it were slowed alike.
        let bucket = |span: &BucketSpan, range: Range<usize>| {
            let length = span.end - span.begin;
            (MicrobatchPass::STEP, &stage_program.step[range], span.begin, Some(length))
        };
        let buckets = timeline.buckets.iter().filter(of_stage).map(|span| {
            bucket(span, stage_program.gradient_buckets[span.bucket].reductions.clone())
        });
        let gathers =
            timeline.gathers.iter().filter(of_stage).map(|span| {
                bucket(span, stage_program.gather_buckets[span.bucket].gathers.clone())
            });
        let spans = timeline.spans.iter().filter(|span| span.stage == stage).map(|span| {
            let pass = span.pass;
            let list = stage_program.instructions(pass.chunk_phase());
            match pass.phase {
                Phase::Step => (pass, &list[in_step_phase.clone()], span.begin, None),
                _ => (pass, list, span.begin, Some(span.end - span.begin)),
            }
        });
        // The span of a collective of several stages begins at the stage's arrival, as in a measured step.
        let mut syncs = timeline.stage_syncs.iter().filter(|sync| sync.stage == stage);
        let mut scheduled = vec![];
        for (pass, list, begin, length) in buckets.chain(spans).chain(gathers) {
            if !is_selected(pass) {
                continue;
            }
            let spans = instruction_spans(list, prices);
            let alone = spans.iter().map(|[_, end]| end.0).fold(0.0, f64::max);
            let slowdown = length.filter(|_| alone > 0.0).map_or(1.0, |length| length.0 / alone);
            let slot = stage_program.slot(pass);
            // Time by which collectives of several stages have shifted the instructions after them.
            let mut shift = begin.0;
            for (instr, [begin, end]) in list.iter().zip(spans) {
                let begin = shift + slowdown * begin.0;
                let mut end = shift + slowdown * end.0;
                if let Some(shared) = stage_sync_group(instr).and_then(|_| syncs.next()) {
                    shift += shared.end.0 - end;
                    end = shared.end.0;
                }
                let instruction = ScheduledInstruction { instr, pass, slot };
                scheduled.push((instruction, (1e6 * begin, 1e6 * end)));
            }
        }
        let whole = (0.0, 1e6 * timeline.step_time.0);
        self.step(scheduled.into_iter(), in_step_phase, whole, trace);
    }

    /// Adds the events of a step, of its passes and of its instructions. Of the step phase, `in_step_phase` are the
    /// instructions that overlap with no pass.
    fn step<'a>(
        self,
        scheduled: impl Iterator<Item = (ScheduledInstruction<'a>, (f64, f64))>,
        in_step_phase: Range<usize>,
        whole: (f64, f64),
        trace: &mut TraceText,
    ) {
        let name = if self.step > 0 { format!("step {}", self.step) } else { "step".into() };
        trace.push(&self.event(name, "step", PASSES, whole, json!({ "step": self.step })));
        let mut current: Option<(MicrobatchPass, (f64, f64))> = None;
        let mut step_instructions = 0..;
        for (instruction, span) in scheduled {
            let ScheduledInstruction { instr, pass, .. } = instruction;
            let is_in_bucket = |index: usize| !in_step_phase.contains(&index);
            if pass.phase == Phase::Step && step_instructions.next().is_some_and(is_in_bucket) {
                let event = self.instruction(instr, pass, span);
                trace.push(&TraceEvent { tid: BUCKETS, ..event });
                continue;
            }
            current = match current {
                Some((same, (begin, end))) if same == pass => {
                    Some((pass, (begin, span.1.max(end))))
                }
                finished => {
                    trace.extend(finished.map(|(pass, span)| self.pass(pass, span)).as_slice());
                    Some((pass, span))
                }
            };
            trace.push(&self.instruction(instr, pass, span));
        }
        trace.extend(current.map(|(pass, span)| self.pass(pass, span)).as_slice());
    }

    fn pass(self, pass: MicrobatchPass, span: (f64, f64)) -> TraceEvent {
        let MicrobatchPass { phase, chunk, microbatch } = pass;
        let (mut title, mut args) = match phase {
            Phase::Step => ("update".into(), json!({ "step": self.step })),
            _ => (
                format!("{} {microbatch}", phase.name()),
                json!({ "step": self.step, "microbatch": microbatch }),
            ),
        };
        if self.names_chunk_of(pass) {
            title += &format!(" (chunk {chunk})");
            args["chunk"] = json!(chunk);
        }
        self.event(title, "pass", PASSES, span, args)
    }

    /// Whether the events of a pass name its chunk. The step phase is one for all chunks.
    fn names_chunk_of(self, pass: MicrobatchPass) -> bool {
        self.has_chunks && pass.phase != Phase::Step
    }

    fn instruction(self, instr: &Instr, pass: MicrobatchPass, span: (f64, f64)) -> TraceEvent {
        let thread = match instr.action {
            Action::Collective(_) if instr.overlaps_collectives() => SHARDED_PARAMETERS,
            Action::Collective(_) | Action::Send(_) | Action::Receive(_) => COMMUNICATION,
            _ => COMPUTE,
        };
        let mut args = json!({
            "instruction": instr.action.name(),
            "block": instr.origin.block,
            "op": instr.origin.op,
            "phase": pass.phase.name(),
            "microbatch": pass.microbatch,
            "step": self.step,
        });
        if self.names_chunk_of(pass) {
            args["chunk"] = json!(pass.chunk);
        }
        if let Value::Object(args) = &mut args {
            args.append(&mut work(&instr.kernel()));
        }
        self.event(
            instr.origin.to_string(),
            TimeCategory::of_instruction(instr).name(),
            thread,
            span,
            args,
        )
    }

    fn event(
        self,
        name: String,
        cat: &'static str,
        tid: u64,
        (begin, end): (f64, f64),
        args: Value,
    ) -> TraceEvent {
        TraceEvent { name, ph: "X", cat, ts: begin, dur: end - begin, pid: self.pid, tid, args }
    }
}

/// The kernel in words, with its FLOPs and bytes: those that cross the memory bus, or those of the unsharded tensors of
/// a collective.
fn work(kernel: &Kernel) -> Map<String, Value> {
    let (flops, bytes) = match kernel {
        Kernel::Gemm(gemm) => (Some(gemm.flops()), Some(gemm.traffic())),
        Kernel::Attention(attention) => (Some(attention.flops()), None),
        Kernel::Fused(fused) => (None, Some(fused.traffic)),
        Kernel::Collective(collective) => (None, Some(collective.payload)),
        Kernel::Transfer(transfer) => (None, Some(transfer.bytes)),
    };
    let kernel = Some(("kernel", json!(kernels::name(kernel))));
    let flops = flops.map(|flops| ("flops", json!(flops.0)));
    let bytes = bytes.map(|bytes| ("bytes", json!(bytes.0)));
    let args = kernel.into_iter().chain(flops).chain(bytes);
    args.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The instructions of the step phase that are in no bucket.
fn outside_buckets(stage: &StageProgram) -> Range<usize> {
    stage.bucket_reductions()..stage.before_gathers()
}

/// The names of a process and of its threads.
fn metadata(pid: u64, name: &str) -> [TraceEvent; 7] {
    let meta = |kind: &str, tid: u64, args: Value| {
        let (name, ph, cat) = (kind.to_owned(), "M", "");
        TraceEvent { name, ph, cat, ts: 0.0, dur: 0.0, pid, tid, args }
    };
    let thread = |tid: u64, name: &str| meta("thread_name", tid, json!({ "name": name }));
    [
        meta("process_name", PASSES, json!({ "name": name })),
        meta("process_sort_index", PASSES, json!({ "sort_index": pid })),
        thread(PASSES, "passes"),
        thread(COMPUTE, "compute"),
        thread(COMMUNICATION, "communication"),
        thread(BUCKETS, "overlapped gradient reductions and weight gathers"),
        thread(SHARDED_PARAMETERS, "overlapped collectives of sharded parameters"),
    ]
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
