//! Streams and events: under some seed, a missing wait changes the result.

use std::time::Duration;

use cudarc::driver::result;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::sys::CUresult::*;
use narrows_cuda::KernelFamily;

use crate::device::{self, DeviceArray, error};
use narrows_fake_cuda::child;

const SEEDS: u32 = 8;

/// One stream writes and another reads, with or without a wait. Returns whether the read saw the result.
fn reads_result_of_another_stream(waits: bool) -> bool {
    let context = device::context(0);
    let function = device::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
    let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    let (x, sum, seen) =
        (DeviceArray::of(&[1.0; 64]), DeviceArray::of(&[0.0; 64]), DeviceArray::new(64));
    for _ in 0..4 {
        device::add_into(&function, x, sum, &streams[0]);
    }
    if waits {
        streams[1].wait(&streams[0].record_event(None).unwrap()).unwrap();
    }
    sum.copy_to(seen, &streams[1]);
    streams[1].synchronize().unwrap();
    let seen = seen.read();
    let correct = seen == vec![4.0; 64];
    println!("correct {correct}");
    correct
}

#[test]
fn a_missing_wait_changes_a_result() {
    let outputs =
        child::under_seeds("ordering::a_missing_wait_changes_a_result", 0..SEEDS, &[], || {
            reads_result_of_another_stream(false);
        });
    if !outputs.is_empty() {
        let wrong = outputs.iter().filter(|output| output.contains("correct false")).count();
        assert!(wrong > 0, "none of {SEEDS} seeds shows it");
    }
}

#[test]
fn a_wait_makes_the_result_visible() {
    child::under_seeds("ordering::a_wait_makes_the_result_visible", 0..SEEDS, &[], || {
        assert!(reads_result_of_another_stream(true));
    });
}

/// The host reads memory before a copy to it has run.
#[test]
fn operations_do_not_run_when_they_are_queued() {
    child::under_seeds("ordering::operations_do_not_run_when_they_are_queued", 0..4, &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let array = DeviceArray::of(&[1.0]);
        let mut seen = vec![0.0f32];
        // SAFETY: the vector outlives the copy.
        unsafe { result::memcpy_dtoh_async(&mut seen, array.address, stream.cu_stream()) }.unwrap();
        // SAFETY: a plain read of the vector.
        let early = unsafe { std::ptr::read_volatile(seen.as_ptr()) };
        stream.synchronize().unwrap();
        assert_eq!((early, seen[0]), (0.0, 1.0));
    });
}

/// Operations run while the host makes no calls.
#[test]
fn operations_run_without_host_calls() {
    child::under_one_seed("ordering::operations_run_without_host_calls", &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let array = DeviceArray::of(&[1.0]);
        // SAFETY: the memory is never freed.
        let seen = unsafe {
            std::slice::from_raw_parts_mut(result::malloc_host(4, 0).unwrap().cast::<f32>(), 1)
        };
        unsafe { result::memcpy_dtoh_async(seen, array.address, stream.cu_stream()) }.unwrap();
        for _ in 0..600 {
            // SAFETY: another thread writes the value; a read returns the old or the new one.
            if unsafe { std::ptr::read_volatile(seen.as_ptr()) } == 1.0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("the copy does not run");
    });
}

#[test]
fn events_with_timing_measure_time() {
    child::under_seeds("ordering::events_with_timing_measure_time", 0..2, &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let array = DeviceArray::new(1 << 20);
        let begin = stream.record_event(Some(CU_EVENT_DEFAULT)).unwrap();
        assert!(!begin.is_complete() || begin.is_complete());
        for _ in 0..8 {
            array.fill_zero(&stream);
        }
        let end = stream.record_event(Some(CU_EVENT_DEFAULT)).unwrap();
        assert!(device::becomes_true(|| end.try_is_complete().unwrap()));
        assert!(begin.elapsed_ms(&end).unwrap() > 0.0);
        let untimed = stream.record_event(None).unwrap();
        assert_eq!(error(begin.elapsed_ms(&untimed)), CUDA_ERROR_INVALID_HANDLE);
        assert!(context.new_event(None).unwrap().try_is_complete().unwrap());
    });
}

/// A wait is for the record that precedes it, not for later ones.
#[test]
fn an_event_can_be_recorded_again() {
    child::under_seeds("ordering::an_event_can_be_recorded_again", 0..4, &[], || {
        let context = device::context(0);
        let [one, two] = [(); 2].map(|()| context.new_stream().unwrap());
        let (a, b) = (DeviceArray::of(&[1.0]), DeviceArray::new(1));
        let event = context.new_event(None).unwrap();
        event.record(&one).unwrap();
        two.wait(&event).unwrap();
        // If the wait were for this record, the streams would wait for each other.
        one.wait(&two.record_event(None).unwrap()).unwrap();
        event.record(&one).unwrap();
        a.copy_to(b, &one);
        one.synchronize().unwrap();
        assert_eq!(b.read(), [1.0]);
    });
}
