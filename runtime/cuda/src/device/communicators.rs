//! The NCCL communicators of a device, and its collectives and transfers.
//!
//! There is one communicator per device group of the program's collectives, and one per direction of each stage
//! boundary. Each is split off the communicator of all processes with separate streams and buffers: shared ones would
//! queue the operations of one communicator behind those of another. A communicator is used on one stream at a time, so
//! its operations execute in the order of the calls: gradient reductions during the last backward pass have a stream of
//! their own, and the step phase, which uses the same communicator in captured graphs, begins when they have ended.
//! NCCL allows both uses of a communicator unless `NCCL_GRAPH_MIXING_SUPPORT` is 0.
//!
//! No call blocks. Where NCCL waits for other processes, its state is polled up to a timeout. A process that gives up
//! aborts its communicators, which ends the waiting operations on the GPU.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{ptr, thread};

use cudarc::driver::CudaStream;
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t};
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::{CollectiveFunction, Instr, Program, Reduction};
use narrows_plan::{DType, DeviceGroup};

use super::communicator::{
    JOINING, NCCL_VERSION_MIN, NcclCommunicator, NcclConfig, WaitContext, call_error, nccl_error,
};
use super::gpu::{DeviceMemory, OpenGpu};
use crate::discovery;
use crate::error::CudaError;
use crate::launch::RingShift;
use crate::libraries::CudaLibrary;
use crate::schedule::{NcclCollective, P2pKind, P2pOp};
use narrows_runtime::process_group::{ProcessGroup, gather_and_broadcast};
use narrows_runtime::session::{MeshCoordinates, collective_groups};
use narrows_runtime::{PipelineDirection, RunError};

/// Maximum number of thread blocks of a transfer.
const P2P_BLOCKS_MAX: c_int = 8;

/// Maximum number of thread blocks of a collective, for all programs.
const COLLECTIVE_BLOCKS_MAX: c_int = 32;

/// Multiprocessors of an A100.
const MULTIPROCESSORS_MIN: c_int = 108;

/// Maximum time for aborting all communicators.
const ABORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of thread blocks of a collective of a program. Transfers over different stage boundaries must progress
/// concurrently with each other, with a collective of activations, a collective of sharded parameters and one of a bucket,
/// whatever the other devices do first: together they take fewer blocks than there are multiprocessors, so that all are
/// resident.
fn collective_blocks_max(program: &Program) -> c_int {
    let has_buckets = program
        .stages
        .iter()
        .any(|stage| !(stage.gradient_buckets.is_empty() && stage.gather_buckets.is_empty()));
    let of_parameters = program.instructions().any(Instr::overlaps_collectives);
    let of_activations = program.context.has_activation_collectives();
    let at_once = [has_buckets, of_parameters, of_activations].map(c_int::from).iter().sum();
    let left = MULTIPROCESSORS_MIN - 4 * P2P_BLOCKS_MAX;
    COLLECTIVE_BLOCKS_MAX.min(left / c_int::max(at_once, 1))
}

/// All communicators of a device.
pub(crate) struct NcclCommunicators {
    groups: BTreeMap<DeviceGroup, NcclCommunicator>,
    /// Indexed by direction, then by [`P2pKind`].
    p2p_streams: [[Option<NcclCommunicator>; 2]; 2],
    world: NcclCommunicator,
    timeout: Duration,
}

impl NcclCommunicators {
    /// Creates the communicators. All processes must call this together.
    ///
    /// # Errors
    /// When NCCL does not load, is too old or fails, or when other processes do not join before the timeout.
    pub fn new(
        gpu: &OpenGpu,
        program: &Program,
        coordinates: MeshCoordinates,
        processes: &dyn ProcessGroup,
        timeout: Duration,
    ) -> Result<NcclCommunicators, RunError> {
        if !discovery::library_loads(CudaLibrary::Nccl) {
            return Err(CudaError::LibraryMissing(CudaLibrary::Nccl).into());
        }
        let version = result::get_nccl_version().map_err(|e| call_error("its version", e))?;
        if version < NCCL_VERSION_MIN {
            let message = format!("version {version} is too old: splitting needs 2.18 or newer");
            return Err(nccl_error("its version", message).into());
        }
        // A process that fails here tells the others in the control exchange.
        let id = match processes.rank() {
            0 => Some(result::get_uniqueid().map_err(|e| call_error("creating an id", e))?),
            _ => None,
        };
        let id: Vec<u8> =
            id.map_or(vec![], |id| id.internal.iter().map(|byte| *byte as u8).collect());
        let id = gather_and_broadcast(processes, id, |mut all| all.swap_remove(0))?;
        let mut unique = sys::ncclUniqueId { internal: [0; 128] };
        unique.internal.iter_mut().zip(&id).for_each(|(to, byte)| *to = *byte as c_char);
        gpu.check("its context", gpu.context.bind_to_thread())?;
        let mesh = program.context.mesh;
        let mut raw = ptr::null_mut();
        // No operation runs on this communicator: it is only split.
        let mut config = NcclConfig::new(1);
        let (ranks, rank) = (processes.world_size() as c_int, processes.rank() as c_int);
        // SAFETY: all pointers are valid, and the config begins with its size.
        let started = unsafe {
            let config = (&raw mut config).cast();
            result::comm_init_rank_config(&raw mut raw, ranks, unique, rank, config)
        };
        started.map_err(|e| call_error(JOINING, e))?;
        let world = NcclCommunicator { raw, title: "all devices".into() };
        let wait_context = WaitContext { processes, timeout };
        world.wait_until_ready(JOINING, &wait_context)?;
        let mut communicators = NcclCommunicators {
            groups: BTreeMap::new(),
            p2p_streams: Default::default(),
            world,
            timeout,
        };
        let blocks_max = collective_blocks_max(program);
        for group in collective_groups(program) {
            // The first member is in no other group of this shape.
            let color = coordinates.members(&group, &mesh).map(|members| members[0]);
            let title = format!("{} devices over the {} axis", group.size, group.axis.name());
            let key = coordinates.position(group.axis, &mesh);
            let split = communicators.split((color, key), title, blocks_max, &wait_context)?;
            communicators.groups.extend(split.map(|communicator| (group, communicator)));
        }
        communicators.split_p2p_streams(coordinates, program, &wait_context)?;
        Ok(communicators)
    }

    /// Splits off a communicator for each direction of each stage boundary. Boundaries of the same stage are split one
    /// after the other; with several chunks per stage, the boundary from the last stage to the first comes last.
    fn split_p2p_streams(
        &mut self,
        coordinates: MeshCoordinates,
        program: &Program,
        wait_context: &WaitContext,
    ) -> Result<(), RunError> {
        let (mesh, own) = (&program.context.mesh, coordinates.stage);
        let last = mesh.pipeline - 1;
        // The earlier stage of the device's boundary of each round.
        let of_parity = |parity: u64| {
            let earlier = if own % 2 == parity { Some(own) } else { own.checked_sub(1) };
            earlier.filter(|earlier| *earlier < last)
        };
        let mut rounds: Vec<Option<u64>> = (0..2.min(last)).map(of_parity).collect();
        if program.context.chunks > 1 {
            rounds.push((own == 0 || own == last).then_some(last));
        }
        for direction in PipelineDirection::ALL {
            for earlier in rounds.iter().copied() {
                let column = coordinates.pipeline_index(mesh);
                let color = earlier.map(|earlier| column * mesh.pipeline + earlier);
                let is_later = u64::from(earlier != Some(own));
                let title = match direction {
                    PipelineDirection::Downstream => "transfers to the next stage",
                    PipelineDirection::Upstream => "transfers to the previous stage",
                };
                let split =
                    self.split((color, is_later), title.into(), P2P_BLOCKS_MAX, wait_context)?;
                if let (Some(earlier), Some(communicator)) = (earlier, split) {
                    // The earlier stage sends downstream, the later one upstream.
                    let downstream = direction == PipelineDirection::Downstream;
                    let kind = match (earlier == own) == downstream {
                        true => P2pKind::Send,
                        false => P2pKind::Recv,
                    };
                    self.p2p_streams[direction.index()][kind.index()] = Some(communicator);
                }
            }
        }
        Ok(())
    }

    /// Splits off the devices of one colour, ranked by their keys; `None` for devices without a colour.
    fn split(
        &self,
        (color, key): (Option<u64>, u64),
        title: String,
        blocks_max: c_int,
        wait_context: &WaitContext,
    ) -> Result<Option<NcclCommunicator>, RunError> {
        /// `NCCL_SPLIT_NOCOLOR`
        const NONE: c_int = -1;
        let mut config = NcclConfig::new(blocks_max);
        let number = color.map_or(NONE, |color| color as c_int);
        // NCCL writes the handle when all processes have joined, possibly after this process has given up. The
        // memory is therefore freed only once NCCL is ready.
        let slot: *mut sys::ncclComm_t = Box::into_raw(Box::new(ptr::null_mut()));
        // SAFETY: the communicator and the slot are valid.
        let started = unsafe {
            let config = (&raw mut config).cast();
            sys::ncclCommSplit(self.world.raw, number, key as c_int, slot, config)
        };
        started.result().map_err(|e| call_error(&title, e))?;
        self.world.wait_until_ready(&title, wait_context)?;
        // SAFETY: the slot came from a box, and NCCL no longer uses it.
        let raw = *unsafe { Box::from_raw(slot) };
        if color.is_none() || raw.is_null() {
            return Ok(None);
        }
        let communicator = NcclCommunicator { raw, title };
        communicator.wait_until_ready("splitting", wait_context)?;
        Ok(Some(communicator))
    }

    /// Enqueues a collective on a stream.
    ///
    /// # Errors
    /// When NCCL fails.
    pub fn enqueue_collective(
        &self,
        collective: &NcclCollective,
        arena: &DeviceMemory,
        stream: &CudaStream,
        processes: &dyn ProcessGroup,
    ) -> Result<(), RunError> {
        let Some(communicator) = self.groups.get(&collective.group) else {
            return Err(nccl_error(
                collective.function.kind().name(),
                "no communicator for its device group".into(),
            )
            .into());
        };
        let (raw, stream) = (communicator.raw, stream.cu_stream().cast());
        let members = collective.group.size;
        let reduction = match collective.function.reduction() {
            Reduction::Sum => ncclRedOp_t::ncclSum,
            Reduction::Maximum => ncclRedOp_t::ncclMax,
        };
        let rank = self.local_rank(communicator)?;
        let calls = || -> Result<(), NcclError> {
            for buffer in &collective.buffers {
                let dtype = match buffer.dtype {
                    DType::Bf16 => ncclDataType_t::ncclBfloat16,
                    DType::U32 => ncclDataType_t::ncclUint32,
                    _ => ncclDataType_t::ncclFloat32,
                };
                let width = buffer.dtype.width();
                let count = (buffer.bytes() / width) as usize;
                let part = count / members as usize;
                let part_bytes = part as u64 * width;
                let (source, target) =
                    (arena.address(buffer.source.start), arena.address(buffer.target.start));
                let local_part =
                    |base: u64| if buffer.in_place() { base + rank * part_bytes } else { base };
                // SAFETY: the check of the program verified that operands lie within the arena, and all members
                // execute the same program.
                unsafe {
                    match collective.function {
                        CollectiveFunction::AllReduce(_) => {
                            let (from, to) = (source as *const c_void, target as *mut c_void);
                            result::all_reduce(from, to, count, dtype, reduction, raw, stream)?;
                        }
                        CollectiveFunction::ReduceScatter => {
                            let (from, to) =
                                (source as *const c_void, local_part(target) as *mut c_void);
                            result::reduce_scatter(from, to, part, dtype, reduction, raw, stream)?;
                        }
                        CollectiveFunction::AllGather => {
                            let (from, to) =
                                (local_part(source) as *const c_void, target as *mut c_void);
                            result::all_gather(from, to, part, dtype, raw, stream)?;
                        }
                        CollectiveFunction::AllToAll => {
                            for member in 0..members {
                                let offset = member * part_bytes;
                                let from = (source + offset) as *const c_void;
                                let to = (target + offset) as *mut c_void;
                                let member = member as c_int;
                                result::send(from, part, dtype, member, raw, stream)?;
                                result::recv(to, part, dtype, member, raw, stream)?;
                            }
                        }
                    }
                }
            }
            Ok(())
        };
        grouped(calls).map_err(|e| communicator.error(collective.function.kind().name(), e))?;
        communicator.wait_until_ready(
            collective.function.kind().name(),
            &WaitContext { processes, timeout: self.timeout },
        )
    }

    /// Enqueues a shift of ring attention on a stream.
    ///
    /// # Errors
    /// When NCCL fails.
    pub fn enqueue_shift(
        &self,
        shift: &RingShift,
        arena: &DeviceMemory,
        stream: &CudaStream,
        processes: &dyn ProcessGroup,
    ) -> Result<(), RunError> {
        let kind = CollectiveKind::Shift.name();
        let Some(communicator) = self.groups.get(&shift.group) else {
            return Err(nccl_error(kind, "no communicator for its device group".into()).into());
        };
        let (raw, stream) = (communicator.raw, stream.cu_stream().cast());
        let (members, rank) = (shift.group.size, self.local_rank(communicator)?);
        let [next, previous] =
            [1, members - 1].map(|distance| ((rank + distance) % members) as c_int);
        let bytes = ncclDataType_t::ncclUint8;
        let calls = || -> Result<(), NcclError> {
            for (source, target) in &shift.operands {
                let length = (source.end - source.start) as usize;
                let from = arena.address(source.start) as *const c_void;
                let to = arena.address(target.start) as *mut c_void;
                // SAFETY: the check of the program verified that operands lie within the arena, and all members
                // execute the same program.
                unsafe {
                    result::send(from, length, bytes, next, raw, stream)?;
                    result::recv(to, length, bytes, previous, raw, stream)?;
                }
            }
            Ok(())
        };
        grouped(calls).map_err(|e| communicator.error(kind, e))?;
        communicator.wait_until_ready(kind, &WaitContext { processes, timeout: self.timeout })
    }

    /// Enqueues a transfer on a stream, with one address per operand.
    ///
    /// # Errors
    /// When NCCL fails.
    pub fn enqueue_transfer(
        &self,
        transfer: &P2pOp,
        addresses: impl Iterator<Item = u64>,
        stream: &CudaStream,
        processes: &dyn ProcessGroup,
    ) -> Result<(), RunError> {
        let link = &self.p2p_streams[transfer.direction.index()][transfer.kind.index()];
        let Some(communicator) = link else {
            return Err(nccl_error(
                transfer.name(),
                "no communicator for its stage boundary".into(),
            )
            .into());
        };
        let (raw, stream) = (communicator.raw, stream.cu_stream().cast());
        // The communicator has two ranks, the earlier stage first.
        let peer = c_int::from(transfer.peer_is_downstream());
        let bytes = ncclDataType_t::ncclUint8;
        let calls = || -> Result<(), NcclError> {
            for (address, range) in addresses.zip(&transfer.operands) {
                let length = (range.end - range.start) as usize;
                // SAFETY: the memory at each address has the size of its operand, on both sides.
                unsafe {
                    if transfer.kind == P2pKind::Send {
                        let from = address as *const c_void;
                        result::send(from, length, bytes, peer, raw, stream)?;
                    } else {
                        let to = address as *mut c_void;
                        result::recv(to, length, bytes, peer, raw, stream)?;
                    }
                }
            }
            Ok(())
        };
        grouped(calls).map_err(|e| communicator.error(transfer.name(), e))?;
        communicator
            .wait_until_ready(transfer.name(), &WaitContext { processes, timeout: self.timeout })
    }

    /// An asynchronous error of any communicator.
    pub fn async_error(&self) -> Option<CudaError> {
        self.all().find_map(|communicator| match communicator.async_state() {
            Ok(_) => None,
            Err(error) => Some(communicator.error("a collective or transfer", error)),
        })
    }

    /// Aborts all operations. Graphs that contain operations must have been destroyed. All communicators are aborted
    /// concurrently, since one may wait for another; those that do not finish in time are leaked.
    pub fn abort(self) {
        let NcclCommunicators { groups, p2p_streams, world, .. } = self;
        let links = p2p_streams.into_iter().flatten().flatten();
        let all: Vec<NcclCommunicator> = groups.into_values().chain(links).chain([world]).collect();
        let (sender, aborted) = mpsc::channel();
        let until = Instant::now() + ABORT_TIMEOUT;
        for communicator in all.into_iter().map(ManuallyDrop::new) {
            let sender = sender.clone();
            let spawned = thread::Builder::new().spawn(move || {
                drop(ManuallyDrop::into_inner(communicator));
                let _ = sender.send(());
            });
            if spawned.is_err() {
                // An abort on this thread might hang.
                return;
            }
        }
        drop(sender);
        while aborted.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
    }

    /// Rank of this process in a communicator.
    fn local_rank(&self, communicator: &NcclCommunicator) -> Result<u64, CudaError> {
        // SAFETY: the communicator is valid.
        let rank = unsafe { result::comm_user_rank(communicator.raw) };
        Ok(rank.map_err(|e| communicator.error("its rank", e))? as u64)
    }

    fn all(&self) -> impl Iterator<Item = &NcclCommunicator> {
        let links = self.p2p_streams.iter().flatten().flatten();
        self.groups.values().chain(links).chain([&self.world])
    }
}

/// Makes calls in an NCCL group, which is closed even if one of them fails.
fn grouped(calls: impl FnOnce() -> Result<(), NcclError>) -> Result<NcclStatus, NcclError> {
    result::group_start()?;
    let result = calls();
    let ended = result::group_end();
    result.and(ended)
}
