//! Streams and events: what nobody waits for happens too early or too late under some seed.

use std::time::Duration;

use cudarc::driver::result;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::sys::CUresult::*;
use narrows_cuda::KernelFamily;

use crate::gpu::{self, Numbers, error};
use narrows_fake_cuda::child;

const SEEDS: u32 = 8;

/// One stream makes what another reads. `waits`: whether it is told to wait.
fn read_by_another(waits: bool) -> bool {
    let context = gpu::context(0);
    let function = gpu::kernel(&context, KernelFamily::Elementwise, "add_into_f32_v1");
    let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    let (x, sum, seen) = (Numbers::of(&[1.0; 64]), Numbers::of(&[0.0; 64]), Numbers::new(64));
    for _ in 0..4 {
        gpu::add_into(&function, x, sum, &streams[0]);
    }
    if waits {
        streams[1].wait(&streams[0].record_event(None).unwrap()).unwrap();
    }
    sum.copy_to(seen, &streams[1]);
    streams[1].synchronize().unwrap();
    let seen = seen.read();
    let right = seen == vec![4.0; 64];
    println!("seen {right}");
    right
}

#[test]
fn a_missing_wait_is_seen() {
    let said = child::seeded("order::a_missing_wait_is_seen", SEEDS, &[], || {
        read_by_another(false);
    });
    if !said.is_empty() {
        let wrong = said.iter().filter(|said| said.contains("seen false")).count();
        assert!(wrong > 0, "of {SEEDS} seeds none shows it");
    }
}

#[test]
fn what_is_waited_for_is_there() {
    child::seeded("order::what_is_waited_for_is_there", SEEDS, &[], || {
        assert!(read_by_another(true));
    });
}

/// The host reads what a copy to it has not written yet.
#[test]
fn nothing_runs_when_it_is_queued() {
    child::seeded("order::nothing_runs_when_it_is_queued", 4, &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let numbers = Numbers::of(&[1.0]);
        let mut seen = vec![0.0f32];
        // SAFETY: it lives until the stream is waited for.
        unsafe { result::memcpy_dtoh_async(&mut seen, numbers.at, stream.cu_stream()) }.unwrap();
        // SAFETY: as the host would, who takes it for there.
        let early = unsafe { std::ptr::read_volatile(seen.as_ptr()) };
        stream.synchronize().unwrap();
        assert_eq!((early, seen[0]), (0.0, 1.0));
    });
}

/// A device goes on while the host does something else.
#[test]
fn a_quiet_host_holds_nothing_up() {
    child::once("order::a_quiet_host_holds_nothing_up", &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let numbers = Numbers::of(&[1.0]);
        // SAFETY: it stays until the process ends.
        let seen = unsafe {
            std::slice::from_raw_parts_mut(result::malloc_host(4, 0).unwrap().cast::<f32>(), 1)
        };
        unsafe { result::memcpy_dtoh_async(seen, numbers.at, stream.cu_stream()) }.unwrap();
        for _ in 0..600 {
            // SAFETY: another thread writes it; what is read is a number or NaN.
            if unsafe { std::ptr::read_volatile(seen.as_ptr()) } == 1.0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("nothing advances by itself");
    });
}

#[test]
fn events_measure_time_when_they_are_made_to() {
    child::seeded("order::events_measure_time_when_they_are_made_to", 2, &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let numbers = Numbers::new(1 << 20);
        let begin = stream.record_event(Some(CU_EVENT_DEFAULT)).unwrap();
        assert!(!begin.is_complete() || begin.is_complete());
        for _ in 0..8 {
            numbers.zero(&stream);
        }
        let end = stream.record_event(Some(CU_EVENT_DEFAULT)).unwrap();
        assert!(gpu::comes_true(|| end.try_is_complete().unwrap()));
        assert!(begin.elapsed_ms(&end).unwrap() > 0.0);
        let untimed = stream.record_event(None).unwrap();
        assert_eq!(error(begin.elapsed_ms(&untimed)), CUDA_ERROR_INVALID_HANDLE);
        assert!(context.new_event(None).unwrap().try_is_complete().unwrap());
    });
}

/// An event is what was recorded when the wait was queued, not what is recorded later.
#[test]
fn an_event_may_be_recorded_again() {
    child::seeded("order::an_event_may_be_recorded_again", 4, &[], || {
        let context = gpu::context(0);
        let [one, two] = [(); 2].map(|()| context.new_stream().unwrap());
        let (a, b) = (Numbers::of(&[1.0]), Numbers::new(1));
        let event = context.new_event(None).unwrap();
        event.record(&one).unwrap();
        two.wait(&event).unwrap();
        // Were the wait for this record, both streams would wait for each other.
        one.wait(&two.record_event(None).unwrap()).unwrap();
        event.record(&one).unwrap();
        a.copy_to(b, &one);
        one.synchronize().unwrap();
        assert_eq!(b.read(), [1.0]);
    });
}
