//! Stream capture: contents and results of graphs, and calls that captures forbid.

use std::fs;
use std::sync::Arc;

use cudarc::driver::sys::CUresult::*;
use cudarc::driver::sys::CUstreamCaptureMode::{self, *};
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
use narrows_cuda::KernelFamily;

use crate::device::{self, DeviceArray, error};
use narrows_fake_cuda::child;

const FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags(0);

/// A graph of two branches, launched three times: left = 4·x.
#[test]
fn branches_fork_and_join() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let path = log.path().to_str().unwrap();
    let test = "graphs::branches_fork_and_join";
    let outputs = child::under_seeds(test, 0..8, &[("NARROWS_FAKE_CUDA_LOG", path)], || {
        let context = device::context(0);
        let function = device::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
        let [main, side] = [(); 2].map(|()| context.new_stream().unwrap());
        let (x, left, right) =
            (DeviceArray::of(&[0.0; 64]), DeviceArray::new(64), DeviceArray::new(64));
        main.begin_capture(CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        x.copy_to(left, &main);
        side.wait(&main.record_event(None).unwrap()).unwrap();
        left.copy_to(right, &side);
        device::add_into(&function, x, right, &side);
        main.wait(&side.record_event(None).unwrap()).unwrap();
        device::add_into(&function, right, left, &main);
        device::add_into(&function, x, left, &main);
        let graph = main.end_capture(FLAGS).unwrap().unwrap();
        assert!(left.read().iter().all(|number| number.is_nan()), "captured operations do not run");
        graph.upload().unwrap();
        for value in [1.0, 2.0, 3.0] {
            x.upload(&[value; 64], &main);
            graph.launch().unwrap();
            main.synchronize().unwrap();
            assert_eq!(left.read(), [4.0 * value; 64]);
        }
        // Streams and events can be used normally after the capture.
        x.copy_to(right, &side);
        side.synchronize().unwrap();
    });
    if outputs.is_empty() {
        return;
    }
    let log = fs::read_to_string(path).unwrap();
    let count = |what: &str| log.lines().filter(|line| line.contains(what)).count();
    assert_eq!(count("host captures graph=1 nodes=5"), 8, "{log}");
    assert_eq!((count("host launches graph=1"), count("launch add_into_f32_v1")), (24, 72));
    assert_eq!((count("graph=1 node=0 copy_dtod 256"), count("graph=1 node=4 ")), (24, 24));
}

/// Nodes that no events order run in any order.
#[test]
fn a_missing_edge_changes_a_result() {
    let outputs = child::under_seeds("graphs::a_missing_edge_changes_a_result", 0..8, &[], || {
        let context = device::context(0);
        let [main, side] = [(); 2].map(|()| context.new_stream().unwrap());
        let (x, y, z) = (DeviceArray::of(&[1.0]), DeviceArray::of(&[0.0]), DeviceArray::of(&[0.0]));
        main.begin_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        side.wait(&main.record_event(None).unwrap()).unwrap();
        x.copy_to(y, &main);
        y.copy_to(z, &side);
        main.wait(&side.record_event(None).unwrap()).unwrap();
        main.end_capture(FLAGS).unwrap().unwrap().launch().unwrap();
        println!("seen {}", z.read()[0]);
    });
    if !outputs.is_empty() {
        for either in ["seen 0\n", "seen 1\n"] {
            assert!(outputs.iter().any(|output| output.contains(either)), "no {either}");
        }
    }
}

type Stream = Arc<CudaStream>;
/// A call during a capture, with the capturing stream, another stream, and an event recorded in the capture.
type Attempt = fn(&Arc<CudaContext>, [&Stream; 2], &CudaEvent) -> Result<(), DriverError>;

fn allocate() -> Result<(), DriverError> {
    // SAFETY: the memory is not used.
    unsafe { result::malloc_sync(4) }.map(drop)
}

#[test]
fn forbidden_calls_invalidate_a_capture() {
    child::under_one_seed("graphs::forbidden_calls_invalidate_a_capture", &[], || {
        const LOCAL: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        const RELAXED: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_RELAXED;
        let context = device::context(0);
        let cases: [(&str, CUstreamCaptureMode, Attempt, CUresult, bool); 11] = [
            (
                "memory in thread-local mode",
                LOCAL,
                |_, _, _| allocate(),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                false,
            ),
            ("memory in relaxed mode", RELAXED, |_, _, _| allocate(), CUDA_SUCCESS, true),
            (
                "synchronising the capturing stream",
                RELAXED,
                |_, [stream, _], _| stream.synchronize(),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                false,
            ),
            (
                "synchronising the context",
                RELAXED,
                |all, _, _| all.synchronize(),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                false,
            ),
            (
                "synchronising another stream",
                LOCAL,
                |_, [_, other], _| other.synchronize(),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                false,
            ),
            (
                "synchronising an event of the capture",
                RELAXED,
                |_, _, event| event.synchronize(),
                CUDA_ERROR_CAPTURED_EVENT,
                false,
            ),
            (
                "querying an event of the capture",
                RELAXED,
                |_, _, event| event.try_is_complete().map(drop),
                CUDA_ERROR_CAPTURED_EVENT,
                false,
            ),
            (
                "joining an uncaptured stream",
                RELAXED,
                |_, [stream, other], _| stream.join(other),
                CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                false,
            ),
            (
                "a wait of the legacy stream",
                RELAXED,
                |all, _, event| all.default_stream().wait(event),
                CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                false,
            ),
            (
                "beginning another capture",
                RELAXED,
                |_, [stream, _], _| stream.begin_capture(RELAXED),
                CUDA_ERROR_ILLEGAL_STATE,
                true,
            ),
            (
                "ending the capture of another stream",
                RELAXED,
                |_, [_, other], _| other.end_capture(FLAGS).map(drop),
                CUDA_ERROR_ILLEGAL_STATE,
                true,
            ),
        ];
        for (name, mode, attempt, expected, stays_valid) in cases {
            let [stream, other] = [(); 2].map(|()| context.new_stream().unwrap());
            stream.begin_capture(mode).unwrap();
            let event = stream.record_event(None).unwrap();
            assert_eq!(error(attempt(&context, [&stream, &other], &event)), expected, "{name}");
            let end =
                if stays_valid { CUDA_SUCCESS } else { CUDA_ERROR_STREAM_CAPTURE_INVALIDATED };
            assert_eq!(error(stream.end_capture(FLAGS)), end, "{name}");
            stream.synchronize().unwrap();
        }
        let legacy = context.default_stream().begin_capture(RELAXED);
        assert_eq!(error(legacy), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    });
}

#[test]
fn unjoined_branches_are_rejected() {
    child::under_one_seed("graphs::unjoined_branches_are_rejected", &[], || {
        let context = device::context(0);
        let [main, side, third] = [(); 3].map(|()| context.new_stream().unwrap());
        let x = DeviceArray::of(&[1.0]);
        let fork = |joins: bool, last: &Stream| {
            main.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
            side.wait(&main.record_event(None).unwrap()).unwrap();
            x.fill_zero(&side);
            if joins {
                main.join(&side).unwrap();
            }
            last.end_capture(FLAGS)
        };
        assert_eq!(error(fork(false, &main)), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        assert_eq!(error(fork(true, &main)), CUDA_SUCCESS);
        assert_eq!(error(fork(true, &side)), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        assert_eq!(error(main.end_capture(FLAGS)), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        // Two captures cannot be merged.
        main.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        third.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        assert_eq!(error(main.join(&third)), CUDA_ERROR_STREAM_CAPTURE_MERGE);
        assert_eq!(error(main.end_capture(FLAGS)), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        assert_eq!(error(third.end_capture(FLAGS)), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        // Streams cannot wait for an event of a capture that has ended.
        main.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        let event = main.record_event(None).unwrap();
        drop(main.end_capture(FLAGS).unwrap());
        assert_eq!(error(side.wait(&event)), CUDA_ERROR_CAPTURED_EVENT);
        event.record(&main).unwrap();
        side.wait(&event).unwrap();
    });
}

/// A graph records an event for waits outside of stream.
#[test]
fn a_graph_records_events() {
    child::under_seeds("graphs::a_graph_records_events", 0..4, &[], || {
        let context = device::context(0);
        let [main, side] = [(); 2].map(|()| context.new_stream().unwrap());
        let (x, y) = (DeviceArray::of(&[1.0]), DeviceArray::of(&[0.0]));
        let event = context.new_event(None).unwrap();
        main.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        x.copy_to(y, &main);
        // SAFETY: both belong to this context; the flag 1 is CU_EVENT_RECORD_EXTERNAL.
        unsafe { sys::cuEventRecordWithFlags(event.cu_event(), main.cu_stream(), 1) }
            .result()
            .unwrap();
        let graph = main.end_capture(FLAGS).unwrap().unwrap();
        let seen = DeviceArray::new(1);
        graph.launch().unwrap();
        side.wait(&event).unwrap();
        y.copy_to(seen, &side);
        side.synchronize().unwrap();
        assert_eq!(seen.read(), [1.0]);
    });
}
