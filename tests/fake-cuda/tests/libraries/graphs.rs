//! Captured streams: what becomes a graph, what it computes when it is launched, and what may not
//! be done meanwhile.

use std::fs;
use std::sync::Arc;

use cudarc::driver::sys::CUresult::*;
use cudarc::driver::sys::CUstreamCaptureMode::{self, *};
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
use narrows_cuda::KernelFamily;

use crate::gpu::{self, Numbers, error};
use narrows_fake_cuda::child;

const FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags(0);

/// Two branches that meet, launched three times: sum = 2·(x + x), each time from anew.
#[test]
fn branches_fork_and_join() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let path = log.path().to_str().unwrap();
    let test = "graphs::branches_fork_and_join";
    let said = child::seeded(test, 8, &[("NARROWS_FAKE_CUDA_LOG", path)], || {
        let context = gpu::context(0);
        let function = gpu::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
        let [main, side] = [(); 2].map(|()| context.new_stream().unwrap());
        let (x, left, right) = (Numbers::of(&[0.0; 64]), Numbers::new(64), Numbers::new(64));
        main.begin_capture(CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        x.copy_to(left, &main);
        side.wait(&main.record_event(None).unwrap()).unwrap();
        left.copy_to(right, &side);
        gpu::add_into(&function, x, right, &side);
        main.wait(&side.record_event(None).unwrap()).unwrap();
        gpu::add_into(&function, right, left, &main);
        gpu::add_into(&function, x, left, &main);
        let graph = main.end_capture(FLAGS).unwrap().unwrap();
        assert!(left.read().iter().all(|number| number.is_nan()), "it was captured, not run");
        graph.upload().unwrap();
        for value in [1.0, 2.0, 3.0] {
            x.put(&[value; 64], &main);
            graph.launch().unwrap();
            main.synchronize().unwrap();
            assert_eq!(left.read(), [4.0 * value; 64]);
        }
        // After the capture, streams and events are as before.
        x.copy_to(right, &side);
        side.synchronize().unwrap();
    });
    if said.is_empty() {
        return;
    }
    let log = fs::read_to_string(path).unwrap();
    let count = |what: &str| log.lines().filter(|line| line.contains(what)).count();
    assert_eq!(count("host captures graph=1 nodes=5"), 8, "{log}");
    assert_eq!((count("host launches graph=1"), count("launch add_into_f32_v1")), (24, 72));
    assert_eq!((count("graph=1 node=0 copy_dtod 256"), count("graph=1 node=4 ")), (24, 24));
}

/// What is not joined by events in a graph has no order either.
#[test]
fn a_missing_edge_is_seen() {
    let said = child::seeded("graphs::a_missing_edge_is_seen", 8, &[], || {
        let context = gpu::context(0);
        let [main, side] = [(); 2].map(|()| context.new_stream().unwrap());
        let (x, y, z) = (Numbers::of(&[1.0]), Numbers::of(&[0.0]), Numbers::of(&[0.0]));
        main.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        side.wait(&main.record_event(None).unwrap()).unwrap();
        x.copy_to(y, &main);
        y.copy_to(z, &side);
        main.wait(&side.record_event(None).unwrap()).unwrap();
        main.end_capture(FLAGS).unwrap().unwrap().launch().unwrap();
        println!("seen {}", z.read()[0]);
    });
    if !said.is_empty() {
        for either in ["seen 0\n", "seen 1\n"] {
            assert!(said.iter().any(|said| said.contains(either)), "no {either}");
        }
    }
}

type Stream = Arc<CudaStream>;
/// Something that is tried while a stream is captured: it, another stream, and an event that was
/// recorded in the capture.
type Attempt = fn(&Arc<CudaContext>, [&Stream; 2], &CudaEvent) -> Result<(), DriverError>;

fn allocate() -> Result<(), DriverError> {
    // SAFETY: nothing is done with it.
    unsafe { result::malloc_sync(4) }.map(drop)
}

#[test]
fn what_a_capture_forbids_ends_it() {
    child::once("graphs::what_a_capture_forbids_ends_it", &[], || {
        const LOCAL: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        const RELAXED: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_RELAXED;
        let context = gpu::context(0);
        let cases: [(&str, CUstreamCaptureMode, Attempt, CUresult, bool); 11] = [
            ("memory", LOCAL, |_, _, _| allocate(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, false),
            ("memory of the relaxed", RELAXED, |_, _, _| allocate(), CUDA_SUCCESS, true),
            (
                "waiting for it",
                RELAXED,
                |_, [it, _], _| it.synchronize(),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                false,
            ),
            (
                "waiting for all",
                RELAXED,
                |all, _, _| all.synchronize(),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                false,
            ),
            (
                "waiting for another",
                LOCAL,
                |_, [_, other], _| other.synchronize(),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                false,
            ),
            (
                "its event",
                RELAXED,
                |_, _, event| event.synchronize(),
                CUDA_ERROR_CAPTURED_EVENT,
                false,
            ),
            (
                "asking its event",
                RELAXED,
                |_, _, event| event.try_is_complete().map(drop),
                CUDA_ERROR_CAPTURED_EVENT,
                false,
            ),
            (
                "an event of before",
                RELAXED,
                |_, [it, other], _| it.join(other),
                CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                false,
            ),
            (
                "the legacy stream",
                RELAXED,
                |all, _, event| all.default_stream().wait(event),
                CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                false,
            ),
            (
                "capturing it again",
                RELAXED,
                |_, [it, _], _| it.begin_capture(RELAXED),
                CUDA_ERROR_ILLEGAL_STATE,
                true,
            ),
            (
                "another's end",
                RELAXED,
                |_, [_, other], _| other.end_capture(FLAGS).map(drop),
                CUDA_ERROR_ILLEGAL_STATE,
                true,
            ),
        ];
        for (name, mode, attempt, wanted, goes_on) in cases {
            let [it, other] = [(); 2].map(|()| context.new_stream().unwrap());
            it.begin_capture(mode).unwrap();
            let event = it.record_event(None).unwrap();
            assert_eq!(error(attempt(&context, [&it, &other], &event)), wanted, "{name}");
            let end = if goes_on { CUDA_SUCCESS } else { CUDA_ERROR_STREAM_CAPTURE_INVALIDATED };
            assert_eq!(error(it.end_capture(FLAGS)), end, "{name}");
            it.synchronize().unwrap();
        }
        let legacy = context.default_stream().begin_capture(RELAXED);
        assert_eq!(error(legacy), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    });
}

#[test]
fn branches_that_do_not_join_are_refused() {
    child::once("graphs::branches_that_do_not_join_are_refused", &[], || {
        let context = gpu::context(0);
        let [main, side, third] = [(); 3].map(|()| context.new_stream().unwrap());
        let x = Numbers::of(&[1.0]);
        let fork = |joins: bool, last: &Stream| {
            main.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
            side.wait(&main.record_event(None).unwrap()).unwrap();
            x.zero(&side);
            if joins {
                main.join(&side).unwrap();
            }
            last.end_capture(FLAGS)
        };
        assert_eq!(error(fork(false, &main)), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        assert_eq!(error(fork(true, &main)), CUDA_SUCCESS);
        assert_eq!(error(fork(true, &side)), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        assert_eq!(error(main.end_capture(FLAGS)), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        // Two captures do not become one.
        main.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        third.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        assert_eq!(error(main.join(&third)), CUDA_ERROR_STREAM_CAPTURE_MERGE);
        assert_eq!(error(main.end_capture(FLAGS)), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        assert_eq!(error(third.end_capture(FLAGS)), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        // An event of a capture that has ended is no event to wait for.
        main.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        let event = main.record_event(None).unwrap();
        drop(main.end_capture(FLAGS).unwrap());
        assert_eq!(error(side.wait(&event)), CUDA_ERROR_CAPTURED_EVENT);
        event.record(&main).unwrap();
        side.wait(&event).unwrap();
    });
}

/// An event that a graph records for those outside of it.
#[test]
fn a_graph_records_events() {
    child::seeded("graphs::a_graph_records_events", 4, &[], || {
        let context = gpu::context(0);
        let [main, side] = [(); 2].map(|()| context.new_stream().unwrap());
        let (x, y) = (Numbers::of(&[1.0]), Numbers::of(&[0.0]));
        let event = context.new_event(None).unwrap();
        main.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        x.copy_to(y, &main);
        // SAFETY: both are of this context; 1 makes a node of it.
        unsafe { sys::cuEventRecordWithFlags(event.cu_event(), main.cu_stream(), 1) }
            .result()
            .unwrap();
        let graph = main.end_capture(FLAGS).unwrap().unwrap();
        let seen = Numbers::new(1);
        graph.launch().unwrap();
        side.wait(&event).unwrap();
        y.copy_to(seen, &side);
        side.synchronize().unwrap();
        assert_eq!(seen.read(), [1.0]);
    });
}
