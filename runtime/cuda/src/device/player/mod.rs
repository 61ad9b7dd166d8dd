//! Plays a tape on a GPU: instruction by instruction, or as graphs that were captured once.
//!
//! Both put the same work on the same streams with the same waits, so they compute the same bits. The
//! first step goes instruction by instruction: what NCCL and the driver make when they are first asked for
//! something cannot be made while a graph is captured.
//!
//! The processor never waits within a step. It puts the whole step on the streams, then waits for its
//! end (`wait`), and looks meanwhile whether the others are still there.

mod border;
mod wait;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, DriverError, result};
use narrows_plan::program::{Phase, Program, Region};

use super::blas::{CublasLt, MatmulPointers};
use super::communicators::NcclCommunicators;
use super::gpu::{DeviceMemory, OpenGpu, PinnedMemory};
use super::inputs::TokenInputs;
use super::laps::InstructionTimers;
use super::modules::{DeviceBuffers, KernelModules, ReadyLaunch};
use crate::error::CudaError;
use crate::launch::{COEFFICIENTS, coefficients};
use crate::tape::{
    DeviceSchedule, GraphNode, GraphSegment, NodeWork, ScheduleItem, SchedulePass, StreamId,
};
use border::StageLink;
use narrows_runtime::RunError;
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::{MeshCoordinates, StepRequest};

/// Instructions that are put on the streams before it is looked how far the device is.
const ENTRIES_AT_A_TIME: usize = 256;

/// Collectives in a graph are as urgent as on their stream
/// (`CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY`).
const USE_NODE_PRIORITY: CUgraphInstantiate_flags = CUgraphInstantiate_flags(8);

/// What a tape needs besides itself.
pub struct ExecutorResources {
    pub products: CublasLt,
    pub memories: DeviceBuffers,
    pub inputs: TokenInputs,
    pub modules: KernelModules,
    /// The other devices, if there are others.
    pub others: Option<(Arc<dyn ProcessGroup>, NcclCommunicators)>,
    /// How long the device may be at one part of a step.
    pub deadline: Duration,
}

/// A device that plays its tape.
pub struct GraphExecutor {
    pub gpu: OpenGpu,
    pub tape: DeviceSchedule,
    pub stage: ExecutorResources,
    pieces: Vec<ReadySegment>,
    lanes: [Arc<CudaStream>; 2],
    /// By way, and by whether this device sends.
    borders: [[Option<StageLink>; 2]; 2],
    /// Where a piece begins on both lanes, and where both have ended.
    fork: CudaEvent,
    join: CudaEvent,
    /// After every leg of a step, in its order.
    legs: Vec<CudaEvent>,
    /// After every so many instructions, in turn.
    paces: [CudaEvent; 2],
    ended: CudaEvent,
    /// Where the square sum is in the arena.
    squares: u64,
    /// The optimizer's numbers on their way there, and the loss and the square sum on their way back.
    numbers: PinnedMemory,
    answers: PinnedMemory,
    pub laps: Option<InstructionTimers>,
    /// Whether graphs are never captured.
    eager: bool,
    steps: u64,
    began: StepProgress,
}

/// A piece, ready.
struct ReadySegment {
    works: Vec<ReadyWork>,
    /// Of entries that another lane waits for.
    events: Vec<Option<CudaEvent>>,
    graph: Option<CapturedGraph>,
}

/// A graph that was captured.
struct CapturedGraph(CudaGraph);

// SAFETY: a graph may be used by any thread, one at a time.
unsafe impl Send for CapturedGraph {}

enum ReadyWork {
    Launches(Vec<ReadyLaunch>),
    Product(MatmulPointers),
    Joint,
}

/// What a step left.
pub struct DeviceStepResult {
    pub loss: f64,
    pub squares: f32,
    pub time: Duration,
}

/// How long a step may take, and who is asked meanwhile.
#[derive(Clone, Copy)]
struct StepProgress {
    at: Instant,
    number: u64,
    /// How often the pace was kept.
    paced: usize,
    /// Legs that are on the streams.
    queued: usize,
    /// Those of them that were over when it was looked last, and when one more was.
    over: usize,
    advanced: Instant,
}

impl StepProgress {
    fn at(now: Instant) -> StepProgress {
        StepProgress { at: now, number: 0, paced: 0, queued: 0, over: 0, advanced: now }
    }
}

impl GraphExecutor {
    /// Prepares everything; nothing is captured yet.
    pub fn new(
        gpu: OpenGpu,
        tape: DeviceSchedule,
        stage: ExecutorResources,
        program: &Program,
        at: MeshCoordinates,
        eager: bool,
    ) -> Result<GraphExecutor, CudaError> {
        let lanes = [gpu.stream(false)?, gpu.stream(true)?];
        let event = || gpu.said("an event", gpu.context.new_event(None));
        let border = |way: usize, sends: bool| match tape.transfers(way == 0, sends) {
            true => StageLink::new(&gpu, sends.then_some(tape.sent_bytes[way])).map(Some),
            false => Ok(None),
        };
        let borders =
            [[border(0, false)?, border(0, true)?], [border(1, false)?, border(1, true)?]];
        let pieces = tape
            .pieces
            .iter()
            .map(|piece| ready(&gpu, piece, &stage))
            .collect::<Result<_, CudaError>>()?;
        let legs = tape.turns.iter().flat_map(|turn| &turn.legs);
        let legs = legs.map(|_| event()).collect::<Result<_, _>>()?;
        let of_stage = &program.stages[at.stage as usize].buffers;
        let squares = of_stage
            .iter()
            .find(|buffer| buffer.region == Region::Input && buffer.name == "square sum")
            .map_or(0, |buffer| buffer.offset);
        let (numbers, answers) =
            (PinnedMemory::new(&gpu, 4 * COEFFICIENTS as usize)?, PinnedMemory::new(&gpu, 16)?);
        let paces = [event()?, event()?];
        let (fork, join, ended) = (event()?, event()?, event()?);
        Ok(GraphExecutor {
            gpu,
            tape,
            stage,
            pieces,
            lanes,
            borders,
            fork,
            join,
            legs,
            paces,
            ended,
            squares,
            numbers,
            answers,
            laps: None,
            eager,
            steps: 0,
            began: StepProgress::at(Instant::now()),
        })
    }

    /// Times every instruction from now on; no graph is replayed then.
    pub fn time_instructions(&mut self) -> Result<(), CudaError> {
        if self.laps.is_none() {
            let laps = InstructionTimers::new(&self.gpu.context);
            self.laps = Some(self.gpu.said("events to time instructions", laps)?);
        }
        Ok(())
    }

    /// Bytes on the GPU besides the arena.
    pub fn scratch_bytes(&self) -> u64 {
        let borders = self.borders.iter().flatten().flatten();
        let copies = borders.filter_map(|border| border.copy.as_ref()).map(DeviceMemory::bytes);
        let ExecutorResources { memories, inputs, products, .. } = &self.stage;
        memories.besides() + inputs.bytes() + products.workspace_bytes() + copies.sum::<u64>()
    }

    /// Plays a step to its end.
    ///
    /// # Errors
    /// When the GPU, NCCL or another process fails, or the step does not end in time: then nothing of
    /// this can be used any more.
    pub fn play(
        &mut self,
        step: &StepRequest,
        program: &Program,
        at: MeshCoordinates,
    ) -> Result<DeviceStepResult, RunError> {
        if self.gpu.lost.load(Ordering::Relaxed) {
            let (call, said) = ("a step".into(), "it failed before".into());
            let ordinal = self.gpu.ordinal;
            return Err(CudaError::Driver { ordinal, call, said, hint: "" }.into());
        }
        let now = Instant::now();
        let began = StepProgress { number: self.steps + 1, ..StepProgress::at(now) };
        self.began = began;
        let played = self.begin(step, program, at).and_then(|()| self.wait());
        // What is on the streams may never end. It is let go when the others have been told.
        self.gpu.lost.fetch_or(played.is_err(), Ordering::Relaxed);
        self.steps += 1;
        played
    }

    /// Ends what is under way on NCCL, and what may be on it again. Graphs go first: a communicator waits for
    /// those that have a part of it.
    pub fn let_go(&mut self) {
        // Graphs bind no context when they are destroyed.
        let _ = self.gpu.context.bind_to_thread();
        self.pieces.iter_mut().for_each(|piece| piece.graph = None);
        if let Some((_, communicators)) = self.stage.others.take() {
            communicators.abort();
        }
    }

    fn compute(&self) -> &Arc<CudaStream> {
        &self.lanes[StreamId::Compute as usize]
    }

    /// Puts a whole step on the streams.
    fn begin(
        &mut self,
        step: &StepRequest,
        program: &Program,
        at: MeshCoordinates,
    ) -> Result<(), RunError> {
        let gpu = &self.gpu;
        gpu.said("its context", gpu.context.bind_to_thread())?;
        let compute = self.compute().clone();
        if let Some(update) = step.update {
            let numbers = coefficients(update.optimizer, update.step);
            self.numbers.bytes_mut().copy_from_slice(bytemuck::cast_slice(&numbers));
        }
        let memories = &self.stage.memories;
        // SAFETY: the memory is pinned, and written again only when the step is over.
        let sent = unsafe {
            let to = memories.coefficients.at(0);
            result::memcpy_htod_async(to, self.numbers.bytes(), compute.cu_stream())
        };
        self.gpu.said("sending the optimizer's numbers", sent)?;
        let loss = &memories.loss;
        // SAFETY: it is as long.
        let zeroed = unsafe {
            result::memset_d8_async(loss.at(0), 0, loss.bytes() as usize, compute.cu_stream())
        };
        self.gpu.said("zeroing the loss", zeroed)?;
        let loaded = self.stage.inputs.load(step, program, at, &compute);
        self.gpu.said("sending the tokens", loaded)?;
        if let Some(laps) = &mut self.laps {
            self.gpu.said("timing", laps.start(&compute))?;
        }
        let capture = !self.eager && self.laps.is_none() && self.steps > 0 && step.update.is_some();
        let mut leg = 0;
        for turn in 0..self.tape.turns.len() {
            let SchedulePass { phase, microbatch, .. } = self.tape.turns[turn];
            if phase != Phase::Step {
                let placed =
                    self.stage.inputs.place(microbatch, &self.stage.memories.arena, &compute);
                self.gpu.said("placing the tokens", placed)?;
            }
            for at in 0..self.tape.turns[turn].legs.len() {
                self.stay_near(leg)?;
                match self.tape.turns[turn].legs[at].clone() {
                    ScheduleItem::Piece(piece) if capture => self.replay(piece)?,
                    ScheduleItem::Piece(piece) => {
                        self.start(piece, step.update.is_some(), false)?
                    }
                    ScheduleItem::Transfer(transfer) => self.transfer(&transfer)?,
                }
                self.gpu.said("a leg's end", self.legs[leg].record(&compute))?;
                leg += 1;
                self.began.queued = leg;
            }
        }
        // What is sent last must be gone before the step is over.
        for border in self.borders.iter().flatten().flatten() {
            self.gpu.said("the last transfers", compute.wait(&border.over))?;
        }
        self.answer(&compute)
    }

    /// Copies back what came of the step.
    fn answer(&mut self, compute: &CudaStream) -> Result<(), RunError> {
        let memories = &self.stage.memories;
        let (loss, squares) = self.answers.bytes_mut().split_at_mut(8);
        // SAFETY: the memory is pinned, and read only when the step is over.
        let copied = unsafe {
            result::memcpy_dtoh_async(loss, memories.loss.at(0), compute.cu_stream()).and_then(
                |()| {
                    let from = memories.arena.at(self.squares);
                    result::memcpy_dtoh_async(&mut squares[..4], from, compute.cu_stream())
                },
            )
        };
        self.gpu.said("the loss", copied)?;
        self.gpu.said("the step's end", self.ended.record(compute))?;
        Ok(())
    }

    /// Puts the entries of a piece on the streams one after the other.
    fn start(&mut self, number: usize, updates: bool, captures: bool) -> Result<(), RunError> {
        let count = self.tape.pieces[number].entries.len();
        let joint = self.tape.pieces[number].is_joint();
        let said = |player: &GraphExecutor, made| player.gpu.said("ordering the streams", made);
        if joint {
            let [compute, collectives] = &self.lanes;
            let forked = self.fork.record(compute).and_then(|()| collectives.wait(&self.fork));
            said(self, forked)?;
        }
        for first in (0..count).step_by(ENTRIES_AT_A_TIME) {
            if !captures {
                self.keep_pace()?;
            }
            self.start_some(number, first..count.min(first + ENTRIES_AT_A_TIME), updates)?;
        }
        if joint {
            let [compute, collectives] = &self.lanes;
            let joined = self.join.record(collectives).and_then(|()| compute.wait(&self.join));
            said(self, joined)?;
        }
        Ok(())
    }

    fn start_some(
        &mut self,
        number: usize,
        entries: Range<usize>,
        updates: bool,
    ) -> Result<(), RunError> {
        let GraphExecutor { gpu, tape, stage, lanes, pieces, laps, .. } = self;
        let (piece, ready) = (&tape.pieces[number], &pieces[number]);
        let said = |made: Result<(), DriverError>| gpu.said("ordering the streams", made);
        for at in entries {
            let (entry, work) = (&piece.entries[at], &ready.works[at]);
            let stream = &lanes[entry.lane as usize];
            if let Some(event) = entry.waits.and_then(|awaited| ready.events[awaited].as_ref()) {
                said(stream.wait(event))?;
            }
            if let Some(laps) = laps {
                let what = (Some(entry.lane), entry.part);
                gpu.said("timing", laps.begin(what, Some([number, at]), stream))?;
            }
            if updates || !entry.updates {
                put(gpu, stage, (entry, work), stream)?;
            }
            if let Some(laps) = laps {
                gpu.said("timing", laps.end(stream))?;
            }
            if let Some(event) = &ready.events[at] {
                said(event.record(stream))?;
            }
        }
        Ok(())
    }

    /// Puts a piece on the streams as one graph, which is captured when it is first wanted.
    fn replay(&mut self, number: usize) -> Result<(), RunError> {
        if self.pieces[number].graph.is_none() {
            let compute = self.compute().clone();
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            self.gpu.said("beginning to capture", compute.begin_capture(mode))?;
            let started = self.start(number, true, true);
            let captured = compute.end_capture(USE_NODE_PRIORITY);
            started?;
            self.pieces[number].graph =
                self.gpu.said("capturing a graph", captured)?.map(CapturedGraph);
        }
        match &self.pieces[number].graph {
            Some(graph) => Ok(self.gpu.said("starting a graph", graph.0.launch())?),
            // Nothing was put on the streams.
            None => Ok(()),
        }
    }
}

/// Resolves the addresses of a piece's work.
fn ready(
    gpu: &OpenGpu,
    piece: &GraphSegment,
    stage: &ExecutorResources,
) -> Result<ReadySegment, CudaError> {
    let arena = &stage.memories.arena;
    let mut works = vec![];
    let mut events = vec![];
    for entry in &piece.entries {
        works.push(match &entry.work {
            NodeWork::Launches(launches) => {
                let ready = launches.iter().map(|launch| {
                    stage.modules.ready(launch, &stage.memories).ok_or_else(|| {
                        let (call, said) = (launch.kernel.clone(), "it was not loaded".into());
                        CudaError::Driver { ordinal: gpu.ordinal, call, said, hint: "" }
                    })
                });
                ReadyWork::Launches(ready.collect::<Result<_, _>>()?)
            }
            NodeWork::Product(matmul) => {
                ReadyWork::Product([matmul.a, matmul.b, matmul.c].map(|at| arena.at(at.offset)))
            }
            NodeWork::Joint(_) => ReadyWork::Joint,
        });
        let event = || gpu.said("an event", gpu.context.new_event(None));
        events.push(entry.awaited.then(event).transpose()?);
    }
    Ok(ReadySegment { works, events, graph: None })
}

/// Puts one instruction on a stream.
fn put(
    gpu: &OpenGpu,
    stage: &ExecutorResources,
    (entry, ready): (&GraphNode, &ReadyWork),
    stream: &CudaStream,
) -> Result<(), RunError> {
    match (ready, &entry.work) {
        (ReadyWork::Launches(launches), _) => {
            for launch in launches {
                if let Err(error) = launch.start(stream.cu_stream()) {
                    let call = format!("{} of {}", entry.name, entry.origin);
                    return Err(CudaError::driver(gpu.ordinal, &call, error).into());
                }
            }
        }
        (ReadyWork::Product(places), NodeWork::Product(matmul)) => {
            stage.products.start(&matmul.key, *places, stream)?;
        }
        (_, NodeWork::Joint(joint)) => match &stage.others {
            Some((cluster, communicators)) => {
                communicators.start(joint, &stage.memories.arena, stream, &**cluster)?;
            }
            // A group of one has nothing to say to itself.
            None => debug_assert_eq!(joint.sharing.size, 1),
        },
        _ => {}
    }
    Ok(())
}
