//! The executor: enqueues steps on the streams of a GPU.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, result};
use narrows_plan::program::{MicrobatchPass, Phase, Program};
use narrows_runtime::session::{MeshCoordinates, StepRequest, StepTask};
use narrows_runtime::{PipelineDirection, RunError};

use super::p2p_stream::P2pStream;
use super::queue_limit::awaited_items;
use super::resources::ExecutorResources;
use super::segment::{CapturedGraph, ReadySegment, enqueue_node};
use crate::device::cudnn::Cudnn;
use crate::device::gpu::{DeviceMemory, OpenGpu, PinnedMemory};
use crate::device::timers::{InstructionTimers, TimedInstruction, TimedNode};
use crate::error::CudaError;
use crate::launch::{OPTIMIZER_COEFFICIENTS, optimizer_coefficients};
use crate::schedule::{DeviceSchedule, GraphNode, P2pKind, ScheduleItem, StreamId};

/// Nodes that are enqueued between two waits for the GPU.
const NODES_PER_THROTTLE: usize = 256;

/// Gives graph nodes the priority of the stream they were captured on
/// (`CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY`).
const USE_NODE_PRIORITY: CUgraphInstantiate_flags = CUgraphInstantiate_flags(8);

/// Executes the schedule of a device.
pub(crate) struct GraphExecutor {
    pub gpu: OpenGpu,
    pub schedule: DeviceSchedule,
    pub resources: ExecutorResources,
    segments: Vec<ReadySegment>,
    /// Indexed by [`StreamId`].
    streams: [Arc<CudaStream>; StreamId::ALL.len()],
    /// Indexed by direction, then by [`P2pKind`].
    pub(super) p2p_streams: [[Option<P2pStream>; 2]; 2],
    /// Recorded where a segment begins on all of its streams.
    fork: CudaEvent,
    /// Recorded where a stream of collectives of a segment has ended.
    join: CudaEvent,
    /// Recorded where the collectives of a bucket begin, and where gradient reductions during the last backward pass end.
    reductions: [CudaEvent; 2],
    /// Recorded at the end of each gather bucket, which later steps await.
    pub(super) gathers: Vec<CudaEvent>,
    /// Recorded after each item of a step, in their order.
    pub(super) item_events: Vec<CudaEvent>,
    /// For each item of a step, the earlier item whose end the host awaits before enqueuing it.
    pub(super) awaited_items: Vec<Option<usize>>,
    /// Recorded alternately after every [`NODES_PER_THROTTLE`] nodes.
    pub(super) throttle_events: [CudaEvent; 2],
    pub(super) step_end: CudaEvent,
    /// Offset of the sum of squared gradients in the arena.
    square_sum_offset: u64,
    /// Staging memory of the optimizer's coefficients.
    coefficients: PinnedMemory,
    /// Staging memory of the loss (f64) and the sum of squares (f32).
    pub(super) results: PinnedMemory,
    pub timers: Option<InstructionTimers>,
    /// Whether graphs are never captured.
    eager: bool,
    /// Steps that have begun.
    steps: u64,
    pub(super) progress: StepProgress,
}

/// Results of a step on one device.
pub(crate) struct DeviceStepResult {
    pub loss: f64,
    /// Sum of squared gradients.
    pub gradient_square_sum: f32,
    pub time: Duration,
}

/// Progress of the step that is being executed.
#[derive(Clone, Copy)]
pub(super) struct StepProgress {
    pub started: Instant,
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Number of throttle events that were recorded.
    pub throttle_count: usize,
    /// Items that are enqueued.
    pub queued: usize,
    /// Items that had ended at the last check.
    pub completed: usize,
    /// When `completed` last increased.
    pub last_advance: Instant,
}

impl StepProgress {
    fn of_step(step: u64) -> StepProgress {
        let now = Instant::now();
        StepProgress {
            started: now,
            step,
            throttle_count: 0,
            queued: 0,
            completed: 0,
            last_advance: now,
        }
    }
}

impl GraphExecutor {
    /// Resolves all addresses and creates streams and events; captures nothing yet.
    pub fn new(
        gpu: OpenGpu,
        schedule: DeviceSchedule,
        resources: ExecutorResources,
        program: &Program,
        coordinates: MeshCoordinates,
        eager: bool,
    ) -> Result<GraphExecutor, CudaError> {
        let collectives = || gpu.stream(true);
        let streams = [gpu.stream(false)?, collectives()?, collectives()?, collectives()?];
        let event = || gpu.check("an event", gpu.context.new_event(None));
        let link = |direction: PipelineDirection, kind: P2pKind| {
            if !schedule.has_transfers(direction, kind) {
                return Ok(None);
            }
            let send_bytes =
                (kind == P2pKind::Send).then_some(schedule.send_bytes_max[direction.index()]);
            P2pStream::new(&gpu, send_bytes).map(Some)
        };
        let links = |direction| {
            let [recv, send] = P2pKind::ALL.map(|kind| link(direction, kind));
            Ok::<_, CudaError>([recv?, send?])
        };
        let [downstream, upstream] = PipelineDirection::ALL.map(links);
        let p2p_streams = [downstream?, upstream?];
        let segments = schedule
            .segments
            .iter()
            .map(|segment| ReadySegment::new(&gpu, segment, &resources))
            .collect::<Result<_, CudaError>>()?;
        let items = schedule.passes.iter().flat_map(|pass| &pass.items);
        let awaited_items = awaited_items(items.clone());
        let item_events = items.map(|_| event()).collect::<Result<_, _>>()?;
        let program_stage = &program.stages[coordinates.stage as usize];
        let square_sum_offset = program_stage.buffer(program_stage.square_sum()).offset;
        let coefficients = PinnedMemory::new(&gpu, 4 * OPTIMIZER_COEFFICIENTS as usize)?;
        let results = PinnedMemory::new(&gpu, 16)?;
        let throttle_events = [event()?, event()?];
        let (fork, join, step_end) = (event()?, event()?, event()?);
        let reductions = [event()?, event()?];
        let gathers = program_stage.gather_buckets.iter().map(|_| event());
        let gathers = gathers.collect::<Result<_, _>>()?;
        Ok(GraphExecutor {
            gpu,
            schedule,
            resources,
            segments,
            streams,
            p2p_streams,
            fork,
            join,
            reductions,
            gathers,
            item_events,
            awaited_items,
            throttle_events,
            step_end,
            square_sum_offset,
            coefficients,
            results,
            timers: None,
            eager,
            steps: 0,
            progress: StepProgress::of_step(0),
        })
    }

    /// Times every instruction from now on; graphs are then no longer replayed.
    pub fn time_instructions(&mut self) -> Result<(), CudaError> {
        if self.timers.is_none() {
            let timers = InstructionTimers::new(&self.gpu.context);
            self.timers = Some(self.gpu.check("events to time instructions", timers)?);
        }
        Ok(())
    }

    /// Bytes on the GPU besides the arena.
    pub fn scratch_bytes(&self) -> u64 {
        let links = self.p2p_streams.iter().flatten().flatten();
        let send_buffers = links.filter_map(|link| link.send_buffer.as_ref());
        let ExecutorResources { buffers, inputs, cublaslt, cudnn, .. } = &self.resources;
        buffers.auxiliary_bytes()
            + inputs.bytes()
            + cublaslt.workspace_bytes()
            + cudnn.as_ref().map_or(0, Cudnn::workspace_bytes)
            + send_buffers.map(DeviceMemory::bytes).sum::<u64>()
    }

    /// Executes a step and waits for its end. Gathers of updated weights may still run afterwards: the next step waits for
    /// them, and other readers of weights call [`wait_for_gathers`](GraphExecutor::wait_for_gathers).
    ///
    /// # Errors
    /// When the GPU, NCCL or another process fails, or the step makes no progress before the timeout. The executor
    /// cannot be used afterwards.
    pub fn run_step(
        &mut self,
        step: &StepRequest,
        program: &Program,
        coordinates: MeshCoordinates,
    ) -> Result<DeviceStepResult, RunError> {
        if self.gpu.abandoned.load(Ordering::Relaxed) {
            let (call, message) = ("a step".into(), "an earlier step failed".into());
            let ordinal = self.gpu.ordinal;
            return Err(CudaError::Driver { ordinal, call, message, hint: None }.into());
        }
        // The first step that trains is never captured, whatever was evaluated before it.
        self.steps += u64::from(!matches!(step.task, StepTask::Loss));
        self.progress = StepProgress::of_step(self.steps);
        let result =
            self.enqueue_step(step, program, coordinates).and_then(|()| self.wait_for_step());
        // Work on the streams may never end. `shut_down` aborts it once the other processes have been told.
        self.gpu.abandoned.fetch_or(result.is_err(), Ordering::Relaxed);
        result
    }

    /// Aborts all work of NCCL, once gathers of weights have ended. Graphs are destroyed first: aborting a communicator
    /// waits for the graphs that contain its collectives.
    pub fn shut_down(&mut self) {
        // Destroying a graph does not bind the context itself.
        let _ = self.gpu.context.bind_to_thread();
        if !self.gpu.abandoned.load(Ordering::Relaxed) {
            // Other processes gather with this one. A failure abandons the device.
            let _ = self.wait_for_gathers();
        }
        self.segments.iter_mut().for_each(|segment| segment.graph = None);
        if let Some((_, communicators)) = self.resources.peers.take() {
            communicators.abort();
        }
    }

    pub(super) fn compute_stream(&self) -> &Arc<CudaStream> {
        &self.streams[StreamId::Compute as usize]
    }

    /// Enqueues a whole step.
    fn enqueue_step(
        &mut self,
        step: &StepRequest,
        program: &Program,
        coordinates: MeshCoordinates,
    ) -> Result<(), RunError> {
        let gpu = &self.gpu;
        gpu.check("its context", gpu.context.bind_to_thread())?;
        let compute = self.compute_stream().clone();
        let updates = step.update().is_some();
        if let Some(update) = step.update() {
            let coefficients = optimizer_coefficients(update);
            self.coefficients.bytes_mut().copy_from_slice(bytemuck::cast_slice(&coefficients));
        }
        let buffers = &self.resources.buffers;
        // SAFETY: the host memory is pinned, and not written before the step has ended.
        let copied = unsafe {
            let to = buffers.coefficients.address(0);
            result::memcpy_htod_async(to, self.coefficients.bytes(), compute.cu_stream())
        };
        self.gpu.check("copying the optimizer's coefficients", copied)?;
        let loss = &buffers.loss;
        // SAFETY: the range is the whole allocation.
        let zeroed = unsafe {
            result::memset_d8_async(loss.address(0), 0, loss.bytes() as usize, compute.cu_stream())
        };
        self.gpu.check("zeroing the loss", zeroed)?;
        let uploaded = self.resources.inputs.upload(step, program, coordinates, &compute);
        self.gpu.check("copying the tokens", uploaded)?;
        if let Some(timers) = &mut self.timers {
            self.gpu.check("timing", timers.start(&compute))?;
        }
        // Graphs contain the updates, and the first step is never captured.
        let use_graphs = !self.eager && self.timers.is_none() && self.steps > 1 && updates;
        let buckets = self.streams[StreamId::Buckets as usize].clone();
        let (mut queued, mut has_reductions) = (0, false);
        for pass in 0..self.schedule.passes.len() {
            let MicrobatchPass { phase, microbatch, .. } = self.schedule.passes[pass].pass;
            if !step.task.includes(phase) {
                // The events of an item have its number among all items of a step.
                queued += self.schedule.passes[pass].items.len();
                continue;
            }
            if phase != Phase::Step {
                let arena = &self.resources.buffers.arena;
                let copied = self.resources.inputs.copy_microbatch(microbatch, arena, &compute);
                self.gpu.check("copying the tokens of a microbatch", copied)?;
            }
            if phase == Phase::Step && has_reductions {
                let [_, ended] = &self.reductions;
                self.gpu.check("awaiting the gradients", compute.wait(ended))?;
            }
            for item in 0..self.schedule.passes[pass].items.len() {
                self.limit_queued_items(queued)?;
                let mut stream = &compute;
                match self.schedule.passes[pass].items[item].clone() {
                    ScheduleItem::Segment(segment) if use_graphs => self.launch_graph(segment)?,
                    ScheduleItem::Segment(segment) => {
                        self.enqueue_segment(segment, updates, false)?
                    }
                    ScheduleItem::Reductions(segment) => {
                        self.enqueue_reductions(segment)?;
                        has_reductions = true;
                        stream = &buckets;
                    }
                    ScheduleItem::Gathers { bucket, segment } => {
                        self.enqueue_bucket(segment)?;
                        let ended = self.gathers[bucket].record(&buckets);
                        self.gpu.check("the end of gathers", ended)?;
                        stream = &buckets;
                    }
                    ScheduleItem::AwaitGathers(bucket) => {
                        let awaited = compute.wait(&self.gathers[bucket]);
                        self.gpu.check("awaiting the weights", awaited)?;
                    }
                    ScheduleItem::Transfer(transfer) => self.enqueue_transfer(&transfer)?,
                }
                self.gpu.check("the end of an item", self.item_events[queued].record(stream))?;
                queued += 1;
                self.progress.queued = queued;
            }
        }
        if let (Some(_), Some(last)) = (&self.timers, self.gathers.last()) {
            // The times of a step are read at its end.
            self.gpu.check("awaiting the weights", compute.wait(last))?;
        }
        // The step ends when the last sends have ended; gathers of weights may still run.
        for link in self.p2p_streams.iter().flatten().flatten() {
            self.gpu.check("the last transfers", compute.wait(&link.done))?;
        }
        self.enqueue_results(&compute)
    }

    /// Enqueues the copy of the step's results to the host.
    fn enqueue_results(&mut self, compute: &CudaStream) -> Result<(), RunError> {
        let buffers = &self.resources.buffers;
        let (loss, squares) = self.results.bytes_mut().split_at_mut(8);
        // SAFETY: the host memory is pinned, and not read before the step has ended.
        let copied = unsafe {
            result::memcpy_dtoh_async(loss, buffers.loss.address(0), compute.cu_stream()).and_then(
                |()| {
                    let from = buffers.arena.address(self.square_sum_offset);
                    result::memcpy_dtoh_async(&mut squares[..4], from, compute.cu_stream())
                },
            )
        };
        self.gpu.check("copying the loss", copied)?;
        self.gpu.check("the end of the step", self.step_end.record(compute))?;
        Ok(())
    }

    /// Enqueues the nodes of a segment one by one; with `capturing` they become a graph.
    fn enqueue_segment(
        &mut self,
        segment: usize,
        updates: bool,
        capturing: bool,
    ) -> Result<(), RunError> {
        let count = self.schedule.segments[segment].nodes.len();
        let beside: Vec<StreamId> = self.schedule.segments[segment].collective_streams().collect();
        let check = |executor: &GraphExecutor, result| {
            executor.gpu.check("synchronising the streams", result)
        };
        if !beside.is_empty() {
            check(self, self.fork.record(self.compute_stream()))?;
        }
        for stream in &beside {
            check(self, self.streams[*stream as usize].wait(&self.fork))?;
        }
        for first in (0..count).step_by(NODES_PER_THROTTLE) {
            if !capturing {
                self.limit_queued_nodes()?;
            }
            self.enqueue_nodes(segment, first..count.min(first + NODES_PER_THROTTLE), updates)?;
        }
        for stream in &beside {
            let joined = self.join.record(&self.streams[*stream as usize]);
            check(self, joined.and_then(|()| self.compute_stream().wait(&self.join)))?;
        }
        Ok(())
    }

    /// Enqueues gradient reductions, which the step phase awaits.
    fn enqueue_reductions(&mut self, segment: usize) -> Result<(), RunError> {
        self.enqueue_bucket(segment)?;
        let [_, end] = &self.reductions;
        let ended = end.record(&self.streams[StreamId::Buckets as usize]);
        Ok(self.gpu.check("synchronising the streams", ended)?)
    }

    /// Enqueues the collectives of a bucket on their stream, from here on beside the compute stream.
    fn enqueue_bucket(&mut self, segment: usize) -> Result<(), RunError> {
        let [compute, .., buckets] = &self.streams;
        let [begin, _] = &self.reductions;
        let forked = begin.record(compute).and_then(|()| buckets.wait(begin));
        self.gpu.check("synchronising the streams", forked)?;
        self.enqueue_nodes(segment, 0..self.schedule.segments[segment].nodes.len(), true)
    }

    fn enqueue_nodes(
        &mut self,
        segment: usize,
        nodes: Range<usize>,
        updates: bool,
    ) -> Result<(), RunError> {
        let GraphExecutor { gpu, schedule, resources, streams, segments, timers, .. } = self;
        let ready = &segments[segment];
        let check =
            |result: Result<(), DriverError>| gpu.check("synchronising the streams", result);
        for index in nodes {
            let (node, work) = (&schedule.segments[segment].nodes[index], &ready.nodes[index]);
            let stream = &streams[node.stream as usize];
            for event in node.waits_for.iter().filter_map(|at| ready.events[*at].as_ref()) {
                check(stream.wait(event))?;
            }
            if let Some(timers) = timers {
                let GraphNode { stream: node_stream, category, begins_instr, .. } = *node;
                let timed_node = Some(TimedNode { stream: node_stream, segment, index });
                let instruction = TimedInstruction { node: timed_node, category, begins_instr };
                gpu.check("timing", timers.begin(instruction, stream))?;
            }
            if updates || !node.updates_weights {
                enqueue_node(gpu, resources, (node, work), stream)?;
            }
            if let Some(timers) = timers {
                gpu.check("timing", timers.end(stream))?;
            }
            if let Some(event) = &ready.events[index] {
                check(event.record(stream))?;
            }
        }
        Ok(())
    }

    /// Enqueues a segment as one graph, capturing it first if needed.
    fn launch_graph(&mut self, segment: usize) -> Result<(), RunError> {
        if self.segments[segment].graph.is_none() {
            let compute = self.compute_stream().clone();
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            self.gpu.check("beginning a capture", compute.begin_capture(mode))?;
            let enqueued = self.enqueue_segment(segment, true, true);
            let captured = compute.end_capture(USE_NODE_PRIORITY);
            enqueued?;
            self.segments[segment].graph =
                self.gpu.check("capturing a graph", captured)?.map(CapturedGraph);
        }
        match &self.segments[segment].graph {
            Some(graph) => Ok(self.gpu.check("launching a graph", graph.0.launch())?),
            // The capture was empty.
            None => Ok(()),
        }
    }
}
