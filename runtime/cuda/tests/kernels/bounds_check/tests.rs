//! The bounds check of launches detects every invalid access.

use narrows_cuda::{Argument, ByteRows, Launch, Launches, MemoryAccess, MemorySpace};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::AccessedBytes;
use crate::case::KernelCase;

/// The backward pass of a norm, which reads, writes, updates, and uses scratch memory.
fn case() -> (KernelCase, Launches) {
    let mut case = KernelCase::new(FusedOp::NormBackward, 1, (1, 24));
    let [dy, x, dx] = [(); 3].map(|()| case.buffer((24, 64), DType::Bf16, None));
    let scale = case.buffer((1, 64), DType::Bf16, None);
    let s = case.buffer((24, 1), DType::F32, None);
    let dscale = case.buffer((1, 64), DType::F32, None);
    case.reads(&[dy, x, scale, s, dscale]).writes(&[dx, dscale]);
    let launches = case.launches().unwrap();
    (case, launches)
}

#[test]
fn accessed_bytes_are_counted() {
    let (case, launches) = case();
    let (row, sums) = (2 * 64, 4 * 64);
    let read = 2 * 24 * row + row + 24 * 4 + sums;
    assert_eq!(case.check(&launches), Ok(AccessedBytes { read, written: 24 * row + sums }));
}

/// The pointers among the arguments of a launch.
fn spans(launches: &mut Launches, launch: usize) -> Vec<&mut ByteRows> {
    let Launch { arguments, table, .. } = &mut launches.launches[launch];
    let arguments = arguments.iter_mut().chain(table);
    arguments
        .filter_map(|argument| match argument {
            Argument::Pointer(span) => Some(span),
            _ => None,
        })
        .collect()
}

#[test]
fn mutated_launches_fail_the_check() {
    type Mutation = (&'static str, fn(&mut ByteRows));
    let mutations: [Mutation; 5] = [
        ("begins early", |span| span.begin = span.begin.wrapping_sub(2)),
        ("begins late", |span| span.begin += 2),
        ("one row more", |span| span.rows += 1),
        ("rows further apart", |span| span.stride_bytes = 1 << 40),
        ("longer rows", |span| span.row_bytes += 1),
    ];
    let (case, original) = case();
    for launch in 0..original.launches.len() {
        let count = spans(&mut original.clone(), launch).len();
        for (at, (name, mutate)) in (0..count).flat_map(|at| mutations.map(|mutate| (at, mutate))) {
            let mut mutated = original.clone();
            let span = &mut spans(&mut mutated, launch)[at];
            let unaffected = (name == "rows further apart" && span.rows == 1)
                || (name == "begins early" && span.begin == 0);
            if span.memory == MemorySpace::Scratch && name == "begins early" || unaffected {
                continue;
            }
            mutate(span);
            let result = case.check(&mutated);
            assert!(result.is_err(), "launch {launch}, argument {at}: {name} is not detected");
        }
    }
    let mut written = original.clone();
    spans(&mut written, 0)[0].access = MemoryAccess::Write;
    assert!(case.check(&written).unwrap_err().contains("argument 0 is outside its operands"));
    let mut unwritten = original.clone();
    unwritten.launches.remove(0);
    assert!(case.check(&unwritten).unwrap_err().contains("of 0 bytes of scratch memory"));
    let mut threads = original.clone();
    threads.launches[0].block = [33, 1, 1];
    assert!(case.check(&threads).unwrap_err().contains("a block of 33 threads"));
    let mut grid = original;
    grid.launches[0].grid = [1, 1 << 16, 1];
    assert!(case.check(&grid).unwrap_err().contains("a grid of"));
}
