//! Segments with resolved addresses, and the graphs captured from them.

use cudarc::driver::{CudaEvent, CudaGraph, CudaStream};
use narrows_runtime::RunError;

use crate::device::cublaslt::MatmulPointers;
use crate::device::cudnn::AttentionPointers;
use crate::device::gpu::OpenGpu;
use crate::device::modules::ReadyLaunch;
use crate::error::CudaError;
use crate::launch::Launch;
use crate::schedule::{GraphNode, GraphSegment, NodeWork};

use super::resources::ExecutorResources;

/// A segment with resolved addresses.
pub(super) struct ReadySegment {
    pub nodes: Vec<ReadyWork>,
    /// Events of the nodes that the other stream waits for.
    pub events: Vec<Option<CudaEvent>>,
    /// The captured graph, once there is one.
    pub graph: Option<CapturedGraph>,
}

/// A captured and instantiated graph.
pub(super) struct CapturedGraph(pub CudaGraph);

// SAFETY: a graph may be used by any thread, one at a time.
unsafe impl Send for CapturedGraph {}

/// The work of a node with resolved addresses.
pub(super) enum ReadyWork {
    Launches(Vec<ReadyLaunch>),
    Attention(AttentionPointers),
    Matmul(MatmulPointers),
    Collective,
}

impl ReadySegment {
    /// Resolves the addresses of a segment.
    pub fn new(
        gpu: &OpenGpu,
        segment: &GraphSegment,
        resources: &ExecutorResources,
    ) -> Result<ReadySegment, CudaError> {
        let arena = &resources.buffers.arena;
        let mut nodes = vec![];
        let mut events = vec![];
        for node in &segment.nodes {
            let ready_launches = |launches: &[Launch]| {
                let ready = launches.iter().map(|launch| {
                    resources.modules.prepare(launch, &resources.buffers).ok_or_else(|| {
                        let (call, message) =
                            (launch.kernel.clone(), "the kernel is not loaded".into());
                        CudaError::Driver { ordinal: gpu.ordinal, call, message, hint: None }
                    })
                });
                ready.collect::<Result<_, CudaError>>().map(ReadyWork::Launches)
            };
            nodes.push(match &node.work {
                NodeWork::Launches(launches) => ready_launches(launches)?,
                NodeWork::Attention(fused, launches) => {
                    let cudnn = resources.cudnn.as_ref();
                    match cudnn.map(|cudnn| cudnn.prepare(fused, arena)).transpose()?.flatten() {
                        Some(pointers) => ReadyWork::Attention(pointers),
                        None => ready_launches(launches)?,
                    }
                }
                NodeWork::Matmul(matmul) => ReadyWork::Matmul(
                    [matmul.a, matmul.b, matmul.c, matmul.d]
                        .map(|matrix| arena.address(matrix.offset)),
                ),
                NodeWork::Collective(_) | NodeWork::Shift(_) => ReadyWork::Collective,
            });
            let event = || gpu.check("an event", gpu.context.new_event(None));
            events.push(node.is_awaited.then(event).transpose()?);
        }
        Ok(ReadySegment { nodes, events, graph: None })
    }
}

/// Enqueues one node on a stream.
pub(super) fn enqueue_node(
    gpu: &OpenGpu,
    resources: &ExecutorResources,
    (node, ready): (&GraphNode, &ReadyWork),
    stream: &CudaStream,
) -> Result<(), RunError> {
    match (ready, &node.work) {
        (ReadyWork::Launches(launches), _) => {
            for launch in launches {
                if let Err(error) = launch.enqueue(stream.cu_stream()) {
                    let call = format!("{} of {}", node.name, node.origin);
                    return Err(CudaError::driver(gpu.ordinal, &call, error).into());
                }
            }
        }
        (ReadyWork::Attention(pointers), NodeWork::Attention(fused, _)) => {
            if let Some(cudnn) = &resources.cudnn {
                cudnn.enqueue(&fused.key, pointers, stream)?;
            }
        }
        (ReadyWork::Matmul(pointers), NodeWork::Matmul(matmul)) => {
            resources.cublaslt.enqueue(&matmul.key, *pointers, stream)?;
        }
        (_, NodeWork::Collective(collective)) => match &resources.peers {
            Some((processes, communicators)) => {
                let arena = &resources.buffers.arena;
                communicators.enqueue_collective(collective, arena, stream, &**processes)?;
            }
            // A collective of one device does nothing.
            None => debug_assert_eq!(collective.group.size, 1),
        },
        (_, NodeWork::Shift(shift)) => {
            if let Some((processes, communicators)) = &resources.peers {
                let arena = &resources.buffers.arena;
                communicators.enqueue_shift(shift, arena, stream, &**processes)?;
            }
        }
        _ => {}
    }
    Ok(())
}
