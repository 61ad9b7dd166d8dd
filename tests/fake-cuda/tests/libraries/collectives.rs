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

use crate::gpu::{self, Numbers};
use narrows_fake_cuda::child;

const COUNT: usize = 3;

/// A process's communicator, and its streams.
struct Rank {
    rank: usize,
    comm: ncclComm_t,
    streams: [Arc<CudaStream>; 2],
}

/// The id that rank 0 makes, through the folder.
fn id(rank: usize, within: &Path) -> ncclUniqueId {
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

/// Settings that say nothing but whether it blocks.
fn settings(blocking: bool) -> sys::ncclConfig_t {
    // SAFETY: numbers and pointers, of which none is read before it is set.
    let mut made: sys::ncclConfig_t = unsafe { MaybeUninit::zeroed().assume_init() };
    made.size = size_of::<sys::ncclConfig_t>();
    made.magic = 0xcafe_beef;
    made.version = 22703;
    made.blocking = i32::from(blocking);
    made
}

fn state(comm: ncclComm_t) -> ncclResult_t {
    let mut state = ncclNumResults;
    // SAFETY: the communicator is not destroyed yet.
    unsafe { sys::ncclCommGetAsyncError(comm, &raw mut state) }.result().unwrap();
    state
}

/// What does not block is asked until it is done.
fn settled(comm: ncclComm_t, result: ncclResult_t) {
    assert!([ncclSuccess, ncclInProgress].contains(&result), "{result:?}");
    while state(comm) == ncclInProgress {
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    assert_eq!(state(comm), ncclSuccess);
}

impl Rank {
    fn new(rank: usize, within: &Path, blocking: bool) -> Rank {
        let context = gpu::context(rank);
        let streams = [(); 2].map(|()| context.new_stream().unwrap());
        let (id, mut config, mut comm) = (id(rank, within), settings(blocking), ptr::null_mut());
        // SAFETY: all is valid, and the thread has a context.
        let begun = unsafe {
            sys::ncclCommInitRankConfig(
                &raw mut comm,
                COUNT as i32,
                id,
                rank as i32,
                &raw mut config,
            )
        };
        if blocking {
            assert_eq!(begun, ncclSuccess);
        } else {
            assert_eq!(begun, ncclInProgress);
        }
        settled(comm, begun);
        Rank { rank, comm, streams }
    }

    fn raw(&self) -> sys::cudaStream_t {
        self.streams[0].cu_stream().cast()
    }

    fn all_reduce(
        &self,
        from: Numbers,
        to: Numbers,
        dtype: ncclDataType_t,
        maximum: bool,
    ) -> ncclResult_t {
        let (operation, count) =
            (if maximum { ncclMax } else { ncclSum }, from.count * 4 / width(dtype));
        let (from, to) = (from.pointer(), to.pointer());
        // SAFETY: the stand-in checks what lies where.
        unsafe { sys::ncclAllReduce(from, to, count, dtype, operation, self.comm, self.raw()) }
    }

    fn send(&self, from: Numbers, peer: usize) -> ncclResult_t {
        let from: *const c_void = from.pointer();
        // SAFETY: as above.
        unsafe { sys::ncclSend(from, COUNT, ncclFloat32, peer as i32, self.comm, self.raw()) }
    }

    fn receive(&self, to: Numbers, peer: usize) -> ncclResult_t {
        // SAFETY: as above.
        unsafe {
            sys::ncclRecv(to.pointer(), COUNT, ncclFloat32, peer as i32, self.comm, self.raw())
        }
    }

    /// Numbers that tell this rank from the others.
    fn own(&self, count: usize) -> Numbers {
        Numbers::of(&(0..count).map(|at| (10 * self.rank + at) as f32).collect::<Vec<_>>())
    }

    fn destroy(self) {
        // SAFETY: it is not used afterwards.
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
fn collectives_do_what_they_are_called() {
    let test = "collectives::collectives_do_what_they_are_called";
    each_seed(test, |number, within| {
        let rank = Rank::new(number, within, true);
        let (comm, stream) = (rank.comm, rank.raw());
        let own = rank.own(6);
        let (all, some, whole) = (Numbers::new(6), Numbers::new(2), Numbers::new(18));
        rank.all_reduce(own, all, ncclFloat32, false).result().unwrap();
        // SAFETY: the stand-in checks what lies where.
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
        // In place, and the largest.
        rank.all_reduce(own, own, ncclFloat32, true).result().unwrap();
        assert_eq!(own.read(), [20.0, 21.0, 22.0, 23.0, 24.0, 25.0]);
        let other = rank.own(6);
        // SAFETY: as above.
        unsafe {
            nccl::broadcast(other.pointer(), other.pointer(), 6, ncclFloat32, 1, comm, stream)
        }
        .unwrap();
        assert_eq!(other.read(), [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]);
        // Of other formats: bit patterns of bf16 1 and 2, of an f64 and of an i64.
        let pair = f32::from_bits(0x4000_3f80);
        let [bf16, f64, i64] =
            [vec![pair], halves(1.5f64.to_bits()), halves(7)].map(|of| Numbers::of(&of));
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

/// In three processes, under each habit of the seed.
fn each_seed(test: &str, body: impl Fn(usize, &Path)) {
    if child::role().is_some() {
        child::together(test, COUNT, 0, &[], body);
        return;
    }
    for seed in 0..4 {
        child::together(test, COUNT, seed, &[], |_, _| {});
    }
}

/// Around a ring: everybody sends before anybody receives, unless both are one group.
#[test]
fn sends_wait_for_their_receives() {
    each_seed("collectives::sends_wait_for_their_receives", |number, within| {
        let rank = Rank::new(number, within, true);
        let (next, before) = ((number + 1) % COUNT, (number + 2) % COUNT);
        let (own, got) = (rank.own(COUNT), Numbers::new(COUNT));
        nccl::group_start().unwrap();
        rank.send(own, next).result().unwrap();
        rank.receive(got, before).result().unwrap();
        nccl::group_end().unwrap();
        assert_eq!(got.read(), [0, 1, 2].map(|at| (10 * before + at) as f32));
        // Everybody has to be here before anybody gives up.
        rank.all_reduce(own, own, ncclFloat32, false).result().unwrap();
        rank.streams[0].synchronize().unwrap();

        rank.send(own, next).result().unwrap();
        rank.receive(got, before).result().unwrap();
        let event = rank.streams[0].record_event(None).unwrap();
        assert!(!gpu::comes_true(|| event.try_is_complete().unwrap()), "it hangs, as with NCCL");
        // Another stream is not held up.
        let x = Numbers::of(&[1.0]);
        x.zero(&rank.streams[1]);
        rank.streams[1].synchronize().unwrap();
        // SAFETY: it is not used afterwards.
        unsafe { nccl::comm_abort(rank.comm) }.unwrap();
        rank.streams[0].synchronize().unwrap();
    });
}

/// Half of the ranks send first, the others receive first: nothing hangs.
#[test]
fn messages_in_a_fitting_order_arrive() {
    each_seed("collectives::messages_in_a_fitting_order_arrive", |number, within| {
        let rank = Rank::new(number, within, true);
        let (own, got) = (rank.own(COUNT), Numbers::new(COUNT));
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

/// A captured collective is a collective at every launch, between others that are not captured.
#[test]
fn collectives_can_be_captured() {
    each_seed("collectives::collectives_can_be_captured", |number, within| {
        let rank = Rank::new(number, within, true);
        let stream = &rank.streams[0];
        let (own, sum, most) = (rank.own(4), Numbers::new(4), Numbers::new(4));
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        rank.all_reduce(own, sum, ncclFloat32, false).result().unwrap();
        rank.all_reduce(sum, most, ncclFloat32, true).result().unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        for round in 0..3 {
            own.put(&[(number + round) as f32; 4], stream);
            graph.launch().unwrap();
            rank.all_reduce(most, most, ncclFloat32, false).result().unwrap();
            stream.synchronize().unwrap();
            assert_eq!(most.read(), [(3 * (3 + 3 * round)) as f32; 4]);
        }
        rank.destroy();
    });
}

/// An abort waits for graphs and for nothing else: not for an event that was recorded in a capture.
#[test]
fn an_abort_waits_for_graphs_alone() {
    each_seed("collectives::an_abort_waits_for_graphs_alone", |number, within| {
        let rank = Rank::new(number, within, true);
        let (stream, own) = (&rank.streams[0], rank.own(4));
        stream.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        rank.all_reduce(own, own, ncclFloat32, false).result().unwrap();
        let event = stream.record_event(None).unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        let comm = rank.comm as usize;
        // SAFETY: it is not used afterwards.
        let abort = std::thread::spawn(move || unsafe { nccl::comm_abort(comm as *mut _) }.is_ok());
        assert!(!gpu::comes_true(|| abort.is_finished()), "a graph has a part of it");
        drop(graph);
        assert!(gpu::comes_true(|| abort.is_finished()), "no graph has");
        assert!(abort.join().unwrap());
        drop(event);
    });
}

/// Ranks that call something else get an error that an abort ends.
#[test]
fn ranks_that_disagree_get_an_error() {
    each_seed("collectives::ranks_that_disagree_get_an_error", |number, within| {
        let rank = Rank::new(number, within, true);
        let own = rank.own(4);
        let fewer = Numbers { count: if number == 2 { 2 } else { 4 }, ..own };
        rank.all_reduce(fewer, fewer, ncclFloat32, false).result().unwrap();
        let event = rank.streams[0].record_event(None).unwrap();
        let failed = || {
            let _ = event.try_is_complete();
            state(rank.comm) == ncclInvalidUsage
        };
        // Others may be late.
        assert!((0..40).any(|_| gpu::comes_true(failed)));
        // SAFETY: it is not used afterwards.
        unsafe { nccl::comm_abort(rank.comm) }.unwrap();
        rank.streams[0].synchronize().unwrap();
    });
}

/// A communicator that does not block, and parts of it.
#[test]
fn communicators_split() {
    each_seed("collectives::communicators_split", |number, within| {
        let rank = Rank::new(number, within, false);
        let mut part = ptr::null_mut();
        // Ranks 0 and 2 in the opposite order, 1 in none.
        let (color, key) = if number == 1 { (-1, 0) } else { (7, -(number as i32)) };
        // SAFETY: the communicator is ready.
        let begun =
            unsafe { sys::ncclCommSplit(rank.comm, color, key, &raw mut part, ptr::null_mut()) };
        settled(rank.comm, begun);
        assert_eq!(part.is_null(), number == 1);
        if number != 1 {
            settled(part, ncclInProgress);
            // SAFETY: it is ready.
            let is =
                unsafe { (nccl::comm_count(part).unwrap(), nccl::comm_user_rank(part).unwrap()) };
            assert_eq!(is, (2, if number == 2 { 0 } else { 1 }));
            let own = Numbers::of(&[number as f32; 4]);
            let within = Rank { rank: number, comm: part, streams: rank.streams.clone() };
            for _ in 0..4 {
                settled(part, within.all_reduce(own, own, ncclFloat32, false));
            }
            within.streams[0].synchronize().unwrap();
            assert_eq!(own.read(), [16.0; 4]);
            within.destroy();
        }
        let own = Numbers::of(&[1.0; 4]);
        settled(rank.comm, rank.all_reduce(own, own, ncclFloat32, false));
        rank.streams[0].synchronize().unwrap();
        assert_eq!(own.read(), [3.0; 4]);
        rank.destroy();
    });
}

/// On a device with room for one collective at once, ranks that leave open which of two comes first
/// hang under some seed, and ranks that say it never do.
#[test]
fn collectives_without_an_order_are_seen() {
    let test = "collectives::collectives_without_an_order_are_seen";
    let variables = [("NARROWS_FAKE_CUDA_ONE_COLLECTIVE", "1")];
    let mut said = vec![];
    let seeds = if child::role().is_some() { 0..1 } else { 0..6 };
    for seed in seeds {
        said.extend(child::together(test, COUNT, seed, &variables, |number, within| {
            let rank = Rank::new(number, within, true);
            let mut comm = ptr::null_mut();
            // SAFETY: the communicator is ready.
            let split = unsafe {
                sys::ncclCommSplit(rank.comm, 0, number as i32, &raw mut comm, ptr::null_mut())
            };
            settled(comm, split);
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
                let done = gpu::comes_true(done);
                assert!(done || !ordered);
                println!("done {done}");
            }
            // At once: what one waits for may lie behind the other.
            let comms = [other.comm as usize, rank.comm as usize];
            std::thread::scope(|scope| {
                for comm in comms {
                    // SAFETY: it is not used afterwards.
                    scope.spawn(move || unsafe { nccl::comm_abort(comm as *mut _) }.unwrap());
                }
            });
        }));
    }
    if !said.is_empty() {
        assert!(said.iter().any(|said| said.contains("done false")), "no seed shows it");
    }
}

/// Two ranks on one device are a mistake, as NCCL takes it.
#[test]
fn a_device_has_one_rank() {
    child::once("collectives::a_device_has_one_rank", &[], || {
        let _context = gpu::context(0);
        let id = nccl::get_uniqueid().unwrap();
        let mut config = settings(false);
        let mut join = |rank| {
            let mut comm = ptr::null_mut();
            // SAFETY: all is valid, and the thread has a context.
            unsafe { sys::ncclCommInitRankConfig(&raw mut comm, 2, id, rank, &raw mut config) }
        };
        assert_eq!((join(0), join(1)), (ncclInProgress, ncclInvalidUsage));
        // SAFETY: the letters are the id's, which ends with zeros.
        let letters = unsafe { slice::from_raw_parts(id.internal.as_ptr().cast::<u8>(), 128) };
        let folder = std::str::from_utf8(letters).unwrap().trim_end_matches('\0');
        fs::remove_dir_all(folder).unwrap();
    });
}
