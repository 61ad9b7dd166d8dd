//! NCCL: the communicators of a device, and its collectives and transfers on them.
//!
//! There is one communicator for each group of the program's collectives, and one for each way of each
//! border between stages, each split off that of the whole run with streams and buffers of its own: shared
//! ones would put what is done on one behind what waits on another. A communicator is used on one stream
//! alone, so what is done on it is done in the order of the calls.
//!
//! None of them blocks: where NCCL waits for others, it is asked again and again whether they have
//! come, up to a deadline. Whoever gives up aborts its communicators, so that what the GPU waits for ends.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;
use cudarc::nccl::result::{self, NcclError, NcclStatus};
use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t};
use narrows_plan::DType;
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::mesh::{Axis, Mesh};
use narrows_plan::program::{Action, Program, Reduction};

use super::super::error::CudaError;
use super::super::libraries::CudaLibrary;
use super::super::machine;
use super::super::tape::{GroupKey, NcclCollective, P2pOp};
use super::communicator::{
    MEETING, NcclCommunicator, NcclConfig, VERSION_MIN, WaitContext, failed, nccl,
};
use super::gpu::{DeviceMemory, OpenGpu};
use narrows_runtime::RunError;
use narrows_runtime::process_group::{ProcessGroup, agree};
use narrows_runtime::session::MeshCoordinates;

/// Blocks of a GPU that a transfer may take, and a collective. Transfers over different borders must go on
/// beside each other, and beside a collective, whatever the other devices do first: together they are
/// fewer than the 108 multiprocessors of an A100, so all are on the GPU at once.
const BORDER_BLOCKS: c_int = 8;
const GROUP_BLOCKS: c_int = 32;

/// How long communicators have to come to their ends.
const ABORT_WITHIN: Duration = Duration::from_secs(10);

/// All communicators of a device.
pub struct NcclCommunicators {
    groups: BTreeMap<GroupKey, NcclCommunicator>,
    /// By way, onward and back; and by whether this device sends.
    borders: [[Option<NcclCommunicator>; 2]; 2],
    whole: NcclCommunicator,
    deadline: Duration,
}

/// The groups of a program's collectives that have more than one device.
fn groups(program: &Program) -> BTreeSet<GroupKey> {
    let all = program.instructions();
    all.filter_map(|instr| match &instr.action {
        Action::Collective(exchange) => {
            Some(GroupKey { axis: exchange.axis, size: exchange.group.size })
        }
        _ => None,
    })
    .collect()
}

impl NcclCommunicators {
    /// Meets the other processes of a cluster. All must call this at once.
    ///
    /// # Errors
    /// When NCCL does not load, is too old or fails, or when others do not come before the deadline.
    pub fn new(
        gpu: &OpenGpu,
        program: &Program,
        at: MeshCoordinates,
        cluster: &dyn ProcessGroup,
        deadline: Duration,
    ) -> Result<NcclCommunicators, RunError> {
        if !machine::loads(CudaLibrary::Nccl) {
            return Err(CudaError::Absent(CudaLibrary::Nccl).into());
        }
        let version = result::get_nccl_version().map_err(|e| failed("its version", e))?;
        if version < VERSION_MIN {
            let said = format!("version {version} is too old: 2.18 or newer splits communicators");
            return Err(nccl("its version", said).into());
        }
        // Whoever fails here tells the others in the agreement.
        let id = match cluster.rank() {
            0 => Some(result::get_uniqueid().map_err(|e| failed("a new id", e))?),
            _ => None,
        };
        let id: Vec<u8> =
            id.map_or(vec![], |id| id.internal.iter().map(|byte| *byte as u8).collect());
        let id = agree(cluster, id, |mut all| all.swap_remove(0))?;
        let mut unique = sys::ncclUniqueId { internal: [0; 128] };
        unique.internal.iter_mut().zip(&id).for_each(|(to, byte)| *to = *byte as c_char);
        gpu.said("its context", gpu.context.bind_to_thread())?;
        let mesh = program.context.mesh;
        let mut raw = ptr::null_mut();
        // Nothing is done on it: it is split.
        let mut config = NcclConfig::new(1);
        let (ranks, rank) = (cluster.world_size() as c_int, cluster.rank() as c_int);
        // SAFETY: all that is pointed to lives, and the config begins with its size.
        let begun = unsafe {
            let config = (&raw mut config).cast();
            result::comm_init_rank_config(&raw mut raw, ranks, unique, rank, config)
        };
        begun.map_err(|e| failed(MEETING, e))?;
        let whole = NcclCommunicator { raw, title: "all devices".into() };
        let watch = WaitContext { cluster, deadline };
        whole.settle(MEETING, &watch)?;
        let mut made = NcclCommunicators {
            groups: BTreeMap::new(),
            borders: Default::default(),
            whole,
            deadline,
        };
        for sharing in groups(program) {
            let color = in_group(&at, sharing, &mesh).then(|| at.group_index(sharing.axis, &mesh));
            let title = format!("{} devices over the {} axis", sharing.size, sharing.axis.name());
            let key = at.position(sharing.axis);
            let split = made.split((color, key), title, GROUP_BLOCKS, &watch)?;
            made.groups.extend(split.map(|communicator| (sharing, communicator)));
        }
        made.meet_neighbours(at, &mesh, &watch)?;
        Ok(made)
    }

    /// Splits off a communicator for either way over each border between stages. Borders that share a
    /// stage are not made at once.
    fn meet_neighbours(
        &mut self,
        at: MeshCoordinates,
        mesh: &Mesh,
        watch: &WaitContext,
    ) -> Result<(), RunError> {
        for way in 0..2 {
            for parity in 0..2.min(mesh.pipeline - 1) {
                // The border after stage b, for b of this parity.
                let before = match at.stage % 2 == parity {
                    true => Some(at.stage),
                    false => at.stage.checked_sub(1),
                };
                let before = before.filter(|before| before + 1 < mesh.pipeline);
                let column = at.group_index(Axis::Pipeline, mesh);
                let color = before.map(|before| column * mesh.pipeline + before);
                let title = format!("the way {} over a border", ["onward", "back"][way]);
                let split = self.split((color, at.stage), title, BORDER_BLOCKS, watch)?;
                if let (Some(before), Some(communicator)) = (before, split) {
                    // Onward the earlier stage sends, back the later one.
                    let sends = (before == at.stage) == (way == 0);
                    self.borders[way][usize::from(sends)] = Some(communicator);
                }
            }
        }
        Ok(())
    }

    /// Splits off the devices of a colour, in the order of their keys; `None` for those without one.
    fn split(
        &self,
        (color, key): (Option<u64>, u64),
        title: String,
        blocks_max: c_int,
        watch: &WaitContext,
    ) -> Result<Option<NcclCommunicator>, RunError> {
        /// `NCCL_SPLIT_NOCOLOR`
        const NONE: c_int = -1;
        let mut config = NcclConfig::new(blocks_max);
        let number = color.map_or(NONE, |color| color as c_int);
        // NCCL writes there when the others have come, which may be after this was given up: it is freed only
        // where it has settled.
        let slot: *mut sys::ncclComm_t = Box::into_raw(Box::new(ptr::null_mut()));
        // SAFETY: the communicator lives, as does the place that is written to.
        let begun = unsafe {
            let config = (&raw mut config).cast();
            sys::ncclCommSplit(self.whole.raw, number, key as c_int, slot, config)
        };
        begun.result().map_err(|e| failed(&title, e))?;
        self.whole.settle(&title, watch)?;
        // SAFETY: it came from a box, and NCCL is done with it.
        let raw = *unsafe { Box::from_raw(slot) };
        if color.is_none() || raw.is_null() {
            return Ok(None);
        }
        let made = NcclCommunicator { raw, title };
        made.settle("meeting", watch)?;
        Ok(Some(made))
    }

    /// Puts a collective on a stream.
    ///
    /// # Errors
    /// When NCCL refuses it.
    pub fn start(
        &self,
        joint: &NcclCollective,
        arena: &DeviceMemory,
        stream: &CudaStream,
        cluster: &dyn ProcessGroup,
    ) -> Result<(), RunError> {
        let Some(communicator) = self.groups.get(&joint.sharing) else {
            return Err(nccl(joint.kind.name(), "there is no such group".into()).into());
        };
        let (raw, stream) = (communicator.raw, stream.cu_stream().cast());
        let members = joint.sharing.size;
        let reduction = match joint.reduction {
            Reduction::Sum => ncclRedOp_t::ncclSum,
            Reduction::Maximum => ncclRedOp_t::ncclMax,
        };
        let me = self.place(communicator)?;
        let start = || -> Result<(), NcclError> {
            for share in &joint.shares {
                let dtype = match share.dtype {
                    DType::Bf16 => ncclDataType_t::ncclBfloat16,
                    DType::U32 => ncclDataType_t::ncclUint32,
                    _ => ncclDataType_t::ncclFloat32,
                };
                let width = share.dtype.width();
                let numbers = (share.bytes() / width) as usize;
                let part = numbers / members as usize;
                let part_bytes = part as u64 * width;
                let (source, target) = (arena.at(share.source.start), arena.at(share.target.start));
                let own = |base: u64| if share.in_place() { base + me * part_bytes } else { base };
                // SAFETY: the operands lie in the arena, whose ranges the program was checked for, and
                // every member has the same program.
                unsafe {
                    match joint.kind {
                        CollectiveKind::AllReduce => {
                            let (from, to) = (source as *const c_void, target as *mut c_void);
                            result::all_reduce(from, to, numbers, dtype, reduction, raw, stream)?;
                        }
                        CollectiveKind::ReduceScatter => {
                            let (from, to) = (source as *const c_void, own(target) as *mut c_void);
                            result::reduce_scatter(from, to, part, dtype, reduction, raw, stream)?;
                        }
                        CollectiveKind::AllGather => {
                            let (from, to) = (own(source) as *const c_void, target as *mut c_void);
                            result::all_gather(from, to, part, dtype, raw, stream)?;
                        }
                        CollectiveKind::AllToAll => {
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
        in_group_of_calls(start).map_err(|e| communicator.failed(joint.kind.name(), e))?;
        communicator.settle(joint.kind.name(), &WaitContext { cluster, deadline: self.deadline })
    }

    /// Puts a transfer on a stream: an operand after the other, from or to these addresses.
    ///
    /// # Errors
    /// When NCCL refuses it.
    pub fn transfer(
        &self,
        transfer: &P2pOp,
        addresses: impl Iterator<Item = u64>,
        stream: &CudaStream,
        cluster: &dyn ProcessGroup,
    ) -> Result<(), RunError> {
        let border = &self.borders[transfer.way()][usize::from(transfer.sends)];
        let Some(communicator) = border else {
            return Err(nccl(transfer.name(), "there is no such border".into()).into());
        };
        let (raw, stream) = (communicator.raw, stream.cu_stream().cast());
        // Of two stages the other; the earlier is 0.
        let other = c_int::from(transfer.onward == transfer.sends);
        let bytes = ncclDataType_t::ncclUint8;
        let start = || -> Result<(), NcclError> {
            for (address, range) in addresses.zip(&transfer.operands) {
                let length = (range.end - range.start) as usize;
                // SAFETY: the callers' memory is as long, and both sides send as much.
                unsafe {
                    if transfer.sends {
                        let from = address as *const c_void;
                        result::send(from, length, bytes, other, raw, stream)?;
                    } else {
                        let to = address as *mut c_void;
                        result::recv(to, length, bytes, other, raw, stream)?;
                    }
                }
            }
            Ok(())
        };
        in_group_of_calls(start).map_err(|e| communicator.failed(transfer.name(), e))?;
        communicator.settle(transfer.name(), &WaitContext { cluster, deadline: self.deadline })
    }

    /// What any communicator says went wrong since it was asked last.
    pub fn failure(&self) -> Option<CudaError> {
        self.all().find_map(|communicator| match communicator.state() {
            Ok(_) => None,
            Err(error) => Some(communicator.failed("a collective or transfer", error)),
        })
    }

    /// Ends all that is under way on any of them; graphs that have parts of it must be destroyed before. All
    /// are aborted at once, since what one waits for may lie behind another; one that does not come to its end
    /// is left behind.
    pub fn abort(self) {
        let NcclCommunicators { groups, borders, whole, .. } = self;
        let borders = borders.into_iter().flatten().flatten();
        let all: Vec<NcclCommunicator> =
            groups.into_values().chain(borders).chain([whole]).collect();
        let (done, over) = mpsc::channel();
        let until = Instant::now() + ABORT_WITHIN;
        for communicator in all.into_iter().map(ManuallyDrop::new) {
            let done = done.clone();
            let begun = thread::Builder::new().spawn(move || {
                drop(ManuallyDrop::into_inner(communicator));
                let _ = done.send(());
            });
            if begun.is_err() {
                // Without threads nothing is ended that might hang.
                return;
            }
        }
        drop(done);
        while over.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok() {}
    }

    /// One's number in a communicator.
    fn place(&self, communicator: &NcclCommunicator) -> Result<u64, CudaError> {
        // SAFETY: the communicator lives.
        let rank = unsafe { result::comm_user_rank(communicator.raw) };
        Ok(rank.map_err(|e| communicator.failed("one's place", e))? as u64)
    }

    fn all(&self) -> impl Iterator<Item = &NcclCommunicator> {
        let borders = self.borders.iter().flatten().flatten();
        self.groups.values().chain(borders).chain([&self.whole])
    }
}

/// Makes calls in a group, which ends also where one of them fails.
fn in_group_of_calls(
    calls: impl FnOnce() -> Result<(), NcclError>,
) -> Result<NcclStatus, NcclError> {
    result::group_start()?;
    let made = calls();
    let ended = result::group_end();
    made.and(ended)
}

/// Whether a device is in a group: of the ends of a pipeline only the first and last stages are.
fn in_group(at: &MeshCoordinates, sharing: GroupKey, mesh: &Mesh) -> bool {
    let size = mesh.axis_size(sharing.axis);
    let along = at.position(sharing.axis);
    sharing.size == size || along == 0 || along + 1 == size
}
