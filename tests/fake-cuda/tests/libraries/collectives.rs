//! Collectives of three processes, each with a device of its own.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::Arc;
use std::{fs, ptr, slice};

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUgraphInstantiate_flags;
use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys::ncclDataType_t::{self, *};
use cudarc::nccl::sys::ncclRedOp_t::*;
use cudarc::nccl::sys::ncclResult_t::{self, *};
use cudarc::nccl::sys::{self, ncclComm_t, ncclUniqueId};

use crate::device::{self, DeviceArray};
use narrows_fake_cuda::child;

const COUNT: usize = 3;

/// The communicator of a process, and its streams.
struct Rank {
    rank: usize,
    comm: ncclComm_t,
    streams: [Arc<CudaStream>; 2],
}

/// The id that rank 0 creates, shared through a file.
fn unique_id(rank: usize, within: &Path) -> ncclUniqueId {
    let (file, unfinished) = (within.join("id"), within.join("id.new"));
    if rank == 0 {
        let id = nccl::get_uniqueid().unwrap();
        let bytes: Vec<u8> = id.internal.iter().map(|letter| *letter as u8).collect();
        fs::write(&unfinished, bytes).unwrap();
        fs::rename(unfinished, &file).unwrap();
        return id;
    }
    while !file.exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let bytes = fs::read(file).unwrap();
    ncclUniqueId { internal: std::array::from_fn(|at| bytes[at] as _) }
}

/// A configuration that sets only whether the communicator blocks.
fn config(blocking: bool) -> sys::ncclConfig_t {
    // SAFETY: zero is a valid value of every field.
    let mut config: sys::ncclConfig_t = unsafe { MaybeUninit::zeroed().assume_init() };
    config.size = size_of::<sys::ncclConfig_t>();
    config.magic = 0xcafe_beef;
    config.version = 22703;
    config.blocking = i32::from(blocking);
    config
}

fn state(comm: ncclComm_t) -> ncclResult_t {
    let mut state = ncclNumResults;
    // SAFETY: the communicator is valid.
    unsafe { sys::ncclCommGetAsyncError(comm, &raw mut state) }.result().unwrap();
    state
}

/// Polls a non-blocking call until it has completed.
fn wait_until_ready(comm: ncclComm_t, result: ncclResult_t) {
    assert!([ncclSuccess, ncclInProgress].contains(&result), "{result:?}");
    while state(comm) == ncclInProgress {
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    assert_eq!(state(comm), ncclSuccess);
}

impl Rank {
    fn new(rank: usize, within: &Path, blocking: bool) -> Rank {
        let context = device::context(rank);
        let streams = [(); 2].map(|()| context.new_stream().unwrap());
        let (id, mut config, mut comm) =
            (unique_id(rank, within), config(blocking), ptr::null_mut());
        // SAFETY: all pointers are valid, and the thread has a context.
        let result = unsafe {
            sys::ncclCommInitRankConfig(
                &raw mut comm,
                COUNT as i32,
                id,
                rank as i32,
                &raw mut config,
            )
        };
        if blocking {
            assert_eq!(result, ncclSuccess);
        } else {
            assert_eq!(result, ncclInProgress);
        }
        wait_until_ready(comm, result);
        Rank { rank, comm, streams }
    }

    fn raw(&self) -> sys::cudaStream_t {
        self.streams[0].cu_stream().cast()
    }

    fn all_reduce(
        &self,
        from: DeviceArray,
        to: DeviceArray,
        dtype: ncclDataType_t,
        maximum: bool,
    ) -> ncclResult_t {
        let (operation, count) =
            (if maximum { ncclMax } else { ncclSum }, from.count * 4 / width(dtype));
        let (from, to) = (from.pointer(), to.pointer());
        // SAFETY: the fake library checks addresses.
        unsafe { sys::ncclAllReduce(from, to, count, dtype, operation, self.comm, self.raw()) }
    }

    fn send(&self, from: DeviceArray, peer: usize) -> ncclResult_t {
        let from: *const c_void = from.pointer();
        // SAFETY: as above.
        unsafe { sys::ncclSend(from, COUNT, ncclFloat32, peer as i32, self.comm, self.raw()) }
    }

    fn receive(&self, to: DeviceArray, peer: usize) -> ncclResult_t {
        // SAFETY: as above.
        unsafe {
            sys::ncclRecv(to.pointer(), COUNT, ncclFloat32, peer as i32, self.comm, self.raw())
        }
    }

    /// An array with values that differ between ranks.
    fn own(&self, count: usize) -> DeviceArray {
        DeviceArray::of(&(0..count).map(|at| (10 * self.rank + at) as f32).collect::<Vec<_>>())
    }

    fn destroy(self) {
        // SAFETY: the communicator is not used afterwards.
        unsafe { nccl::comm_destroy(self.comm) }.unwrap();
    }
}

fn width(dtype: ncclDataType_t) -> usize {
    match dtype {
        ncclFloat64 | ncclInt64 => 8,
        ncclBfloat16 => 2,
        _ => 4,
    }
}

#[test]
fn collectives_are_correct() {
    let test = "collectives::collectives_are_correct";
    under_each_policy(test, |number, within| {
        let rank = Rank::new(number, within, true);
        let (comm, stream) = (rank.comm, rank.raw());
        let own = rank.own(6);
        let (all, some, whole) = (DeviceArray::new(6), DeviceArray::new(2), DeviceArray::new(18));
        rank.all_reduce(own, all, ncclFloat32, false).result().unwrap();
        // SAFETY: the fake library checks addresses.
        unsafe {
            nccl::reduce_scatter(
                own.pointer(),
                some.pointer(),
                2,
                ncclFloat32,
                ncclSum,
                comm,
                stream,
            )
            .unwrap();
            nccl::all_gather(own.pointer(), whole.pointer(), 6, ncclFloat32, comm, stream).unwrap();
        }
        let sum = |at: usize| (30 + 3 * at) as f32;
        assert_eq!(all.read(), [0, 1, 2, 3, 4, 5].map(sum));
        assert_eq!(some.read(), [2 * number, 2 * number + 1].map(sum));
        let gathered: Vec<f32> = (0..18).map(|at| (10 * (at / 6) + at % 6) as f32).collect();
        assert_eq!(whole.read(), gathered);
        // In place, with a maximum.
        rank.all_reduce(own, own, ncclFloat32, true).result().unwrap();
        assert_eq!(own.read(), [20.0, 21.0, 22.0, 23.0, 24.0, 25.0]);
        let other = rank.own(6);
        // SAFETY: as above.
        unsafe {
            nccl::broadcast(other.pointer(), other.pointer(), 6, ncclFloat32, 1, comm, stream)
        }
        .unwrap();
        assert_eq!(other.read(), [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]);
        // Other types: bit patterns of bf16 1 and 2, of an f64 and of an i64.
        let pair = f32::from_bits(0x4000_3f80);
        let [bf16, f64, i64] =
            [vec![pair], halves(1.5f64.to_bits()), halves(7)].map(|of| DeviceArray::of(&of));
        rank.all_reduce(bf16, bf16, ncclBfloat16, false).result().unwrap();
        rank.all_reduce(f64, f64, ncclFloat64, false).result().unwrap();
        rank.all_reduce(i64, i64, ncclInt64, false).result().unwrap();
        assert_eq!(bf16.read()[0].to_bits(), 0x40c0_4040);
        assert_eq!((bits(&f64.read()), bits(&i64.read())), (4.5f64.to_bits(), 21));
        rank.destroy();
    });
}

fn halves(bits: u64) -> Vec<f32> {
    vec![f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32)]
}

fn bits(halves: &[f32]) -> u64 {
    u64::from(halves[1].to_bits()) << 32 | u64::from(halves[0].to_bits())
}

/// Runs a body in three processes under each scheduling policy.
fn under_each_policy(test: &str, body: impl Fn(usize, &Path)) {
    if child::role().is_some() {
        child::as_processes(test, COUNT, 0, &[], body);
        return;
    }
    for seed in 0..4 {
        child::as_processes(test, COUNT, seed, &[], |_, _| {});
    }
}

/// In a ring where all ranks send before they receive, only grouped calls complete.
#[test]
fn sends_wait_for_their_receives() {
    under_each_policy("collectives::sends_wait_for_their_receives", |number, within| {
        let rank = Rank::new(number, within, true);
        let (next, before) = ((number + 1) % COUNT, (number + 2) % COUNT);
        let (own, got) = (rank.own(COUNT), DeviceArray::new(COUNT));
        nccl::group_start().unwrap();
        rank.send(own, next).result().unwrap();
        rank.receive(got, before).result().unwrap();
        nccl::group_end().unwrap();
        assert_eq!(got.read(), [0, 1, 2].map(|at| (10 * before + at) as f32));
        // All ranks must arrive here before any gives up.
        rank.all_reduce(own, own, ncclFloat32, false).result().unwrap();
        rank.streams[0].synchronize().unwrap();

        rank.send(own, next).result().unwrap();
        rank.receive(got, before).result().unwrap();
        let event = rank.streams[0].record_event(None).unwrap();
        assert!(
            !device::becomes_true(|| event.try_is_complete().unwrap()),
            "it must hang, as with NCCL"
        );
        // Other streams are not blocked.
        let x = DeviceArray::of(&[1.0]);
        x.fill_zero(&rank.streams[1]);
        rank.streams[1].synchronize().unwrap();
        // SAFETY: the communicator is not used afterwards.
        unsafe { nccl::comm_abort(rank.comm) }.unwrap();
        rank.streams[0].synchronize().unwrap();
    });
}

/// Each rank receives from the previous one before it sends to the next.
#[test]
fn messages_in_a_consistent_order_arrive() {
    under_each_policy("collectives::messages_in_a_consistent_order_arrive", |number, within| {
        let rank = Rank::new(number, within, true);
        let (own, got) = (rank.own(COUNT), DeviceArray::new(COUNT));
        for _ in 0..3 {
            if number > 0 {
                rank.receive(got, number - 1).result().unwrap();
            }
            if number + 1 < COUNT {
                rank.send(own, number + 1).result().unwrap();
            }
        }
        rank.streams[0].synchronize().unwrap();
        if number > 0 {
            assert_eq!(got.read()[0], (10 * (number - 1)) as f32);
        }
        rank.destroy();
    });
}

/// A captured collective runs at every launch of the graph, interleaved with uncaptured ones.
#[test]
fn collectives_can_be_captured() {
    under_each_policy("collectives::collectives_can_be_captured", |number, within| {
        let rank = Rank::new(number, within, true);
        let stream = &rank.streams[0];
        let (own, sum, most) = (rank.own(4), DeviceArray::new(4), DeviceArray::new(4));
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        rank.all_reduce(own, sum, ncclFloat32, false).result().unwrap();
        rank.all_reduce(sum, most, ncclFloat32, true).result().unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        for round in 0..3 {
            own.upload(&[(number + round) as f32; 4], stream);
            graph.launch().unwrap();
            rank.all_reduce(most, most, ncclFloat32, false).result().unwrap();
            stream.synchronize().unwrap();
            assert_eq!(most.read(), [(3 * (3 + 3 * round)) as f32; 4]);
        }
        rank.destroy();
    });
}

/// An abort waits for graphs that contain collectives, but not for events recorded in their capture.
#[test]
fn an_abort_waits_for_graphs_only() {
    under_each_policy("collectives::an_abort_waits_for_graphs_only", |number, within| {
        let rank = Rank::new(number, within, true);
        let (stream, own) = (&rank.streams[0], rank.own(4));
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        rank.all_reduce(own, own, ncclFloat32, false).result().unwrap();
        let event = stream.record_event(None).unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        let comm = rank.comm as usize;
        // SAFETY: the communicator is not used afterwards.
        let abort = std::thread::spawn(move || unsafe { nccl::comm_abort(comm as *mut _) }.is_ok());
        assert!(!device::becomes_true(|| abort.is_finished()), "a graph contains a collective");
        drop(graph);
        assert!(device::becomes_true(|| abort.is_finished()), "no graph contains a collective");
        assert!(abort.join().unwrap());
        drop(event);
    });
}

/// Mismatched calls are an error, after which an abort succeeds.
#[test]
fn mismatched_calls_are_an_error() {
    under_each_policy("collectives::mismatched_calls_are_an_error", |number, within| {
        let rank = Rank::new(number, within, true);
        let own = rank.own(4);
        let fewer = DeviceArray { count: if number == 2 { 2 } else { 4 }, ..own };
        rank.all_reduce(fewer, fewer, ncclFloat32, false).result().unwrap();
        let event = rank.streams[0].record_event(None).unwrap();
        let failed = || {
            let _ = event.try_is_complete();
            state(rank.comm) == ncclInvalidUsage
        };
        // Other ranks may be late.
        assert!((0..40).any(|_| device::becomes_true(failed)));
        // SAFETY: the communicator is not used afterwards.
        unsafe { nccl::comm_abort(rank.comm) }.unwrap();
        rank.streams[0].synchronize().unwrap();
    });
}

/// A non-blocking communicator and a split of it.
#[test]
fn communicators_can_be_split() {
    under_each_policy("collectives::communicators_can_be_split", |number, within| {
        let rank = Rank::new(number, within, false);
        let mut part = ptr::null_mut();
        // Ranks 0 and 2 in the opposite order, without rank 1.
        let (color, key) = if number == 1 { (-1, 0) } else { (7, -(number as i32)) };
        // SAFETY: the communicator is ready.
        let result =
            unsafe { sys::ncclCommSplit(rank.comm, color, key, &raw mut part, ptr::null_mut()) };
        wait_until_ready(rank.comm, result);
        assert_eq!(part.is_null(), number == 1);
        if number != 1 {
            wait_until_ready(part, ncclInProgress);
            // SAFETY: the communicator is ready.
            let count_and_rank =
                unsafe { (nccl::comm_count(part).unwrap(), nccl::comm_user_rank(part).unwrap()) };
            assert_eq!(count_and_rank, (2, if number == 2 { 0 } else { 1 }));
            let own = DeviceArray::of(&[number as f32; 4]);
            let within = Rank { rank: number, comm: part, streams: rank.streams.clone() };
            for _ in 0..4 {
                wait_until_ready(part, within.all_reduce(own, own, ncclFloat32, false));
            }
            within.streams[0].synchronize().unwrap();
            assert_eq!(own.read(), [16.0; 4]);
            within.destroy();
        }
        let own = DeviceArray::of(&[1.0; 4]);
        wait_until_ready(rank.comm, rank.all_reduce(own, own, ncclFloat32, false));
        rank.streams[0].synchronize().unwrap();
        assert_eq!(own.read(), [3.0; 4]);
        rank.destroy();
    });
}

/// On devices that run one collective at a time, two unordered collectives deadlock under some seed, and ordered ones
/// never do.
#[test]
fn unordered_collectives_deadlock() {
    let test = "collectives::unordered_collectives_deadlock";
    let variables = [("NARROWS_FAKE_CUDA_ONE_COLLECTIVE", "1")];
    let mut outputs = vec![];
    let seeds = if child::role().is_some() { 0..1 } else { 0..6 };
    for seed in seeds {
        outputs.extend(child::as_processes(test, COUNT, seed, &variables, |number, within| {
            let rank = Rank::new(number, within, true);
            let mut comm = ptr::null_mut();
            // SAFETY: the communicator is ready.
            let split = unsafe {
                sys::ncclCommSplit(rank.comm, 0, number as i32, &raw mut comm, ptr::null_mut())
            };
            wait_until_ready(comm, split);
            let mut streams = rank.streams.clone();
            streams.reverse();
            let other = Rank { rank: number, comm, streams };
            for ordered in [true, false] {
                let (a, b) = (rank.own(4), rank.own(4));
                rank.all_reduce(a, a, ncclFloat32, false).result().unwrap();
                if ordered {
                    rank.streams[1].join(&rank.streams[0]).unwrap();
                }
                other.all_reduce(b, b, ncclFloat32, false).result().unwrap();
                let events = [0, 1].map(|at| rank.streams[at].record_event(None).unwrap());
                let done = || events.iter().all(|event| event.try_is_complete().unwrap());
                let done = device::becomes_true(done);
                assert!(done || !ordered);
                println!("done {done}");
            }
            // Concurrently: each may wait for the other.
            let comms = [other.comm as usize, rank.comm as usize];
            std::thread::scope(|scope| {
                for comm in comms {
                    // SAFETY: the communicator is not used afterwards.
                    scope.spawn(move || unsafe { nccl::comm_abort(comm as *mut _) }.unwrap());
                }
            });
        }));
    }
    if !outputs.is_empty() {
        assert!(outputs.iter().any(|output| output.contains("done false")), "no seed shows it");
    }
}

/// NCCL rejects two ranks on one device.
#[test]
fn two_ranks_on_one_device_are_rejected() {
    child::under_one_seed("collectives::two_ranks_on_one_device_are_rejected", &[], || {
        let _context = device::context(0);
        let id = nccl::get_uniqueid().unwrap();
        let mut config = config(false);
        let mut join = |rank| {
            let mut comm = ptr::null_mut();
            // SAFETY: all pointers are valid, and the thread has a context.
            unsafe { sys::ncclCommInitRankConfig(&raw mut comm, 2, id, rank, &raw mut config) }
        };
        assert_eq!((join(0), join(1)), (ncclInProgress, ncclInvalidUsage));
        // SAFETY: the id has 128 bytes, which end with zeros.
        let letters = unsafe { slice::from_raw_parts(id.internal.as_ptr().cast::<u8>(), 128) };
        let folder = std::str::from_utf8(letters).unwrap().trim_end_matches('\0');
        fs::remove_dir_all(folder).unwrap();
    });
}
