//! Properties of every price on all hardware.
//!
//! Larger sizes (rows, columns, contraction, batch, bytes, tokens, heads) are never faster: every candidate that an
//! equation minimises over is non-decreasing, so the minimum is too. More *members* of a collective may be faster (a
//! node's second half adds its network cards), and the rate of a GEMM is not monotone (waves): neither is tested.

use arbtest::arbitrary::{Result, Unstructured};
use arbtest::arbtest;
use narrows_cost_model::profile::{preset, preset_names};
use narrows_cost_model::{Executor, Prices, Profile};
use narrows_plan::kernel::{
    Attention, Collective, CollectiveKind, Direction, FusedKernel, FusedKind, Gemm, Kernel,
    Transfer,
};
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Mesh};

const MESHES: [Mesh; 4] = [
    Mesh { tensor: 4, pipeline: 1, data: 1, context: 1 },
    Mesh { tensor: 2, pipeline: 2, data: 4, context: 1 },
    Mesh { tensor: 8, pipeline: 4, data: 2, context: 1 },
    Mesh { tensor: 3, pipeline: 1, data: 5, context: 1 },
];

/// Prices of a profile without measured kernels, whose correction by the nearest measurement can make a larger kernel
/// the cheaper one.
fn any_prices(u: &mut Unstructured) -> Result<(Prices, Mesh)> {
    let profiles = preset_names().map(|name| preset(name).unwrap());
    let profiles: Vec<Profile> =
        profiles.filter(|profile| profile.file().measured.is_none()).collect();
    let profile = u.choose(&profiles)?;
    let executor = *u.choose(&[Executor::Captured, Executor::Eager])?;
    let mesh = *u.choose(&MESHES)?;
    Ok((Prices::new(profile, executor, &mesh), mesh))
}

/// Sizes of all magnitudes, tile borders included.
fn size(u: &mut Unstructured) -> Result<u64> {
    let near = 1u64 << u.int_in_range(0..=14)?;
    Ok((near + u.int_in_range(0..=near)?).saturating_sub(u.int_in_range(0..=1)?).max(1))
}

fn dtype(u: &mut Unstructured) -> Result<DType> {
    Ok(*u.choose(&[DType::Bf16, DType::F32])?)
}

/// A kernel, and one with at least as much work.
fn pair(u: &mut Unstructured, mesh: &Mesh) -> Result<(Kernel, Kernel)> {
    match u.int_in_range(0..=4)? {
        0 => gemms(u),
        1 => attentions(u),
        2 => fused_ops(u),
        3 => collectives(u, mesh),
        _ => transfers(u, mesh),
    }
}

fn gemms(u: &mut Unstructured) -> Result<(Kernel, Kernel)> {
    let (input, output, accumulate) = (dtype(u)?, dtype(u)?, u.arbitrary()?);
    let (m, n, k, batch) = (size(u)?, size(u)?, size(u)?, u.int_in_range(1..=8)?);
    let less = Gemm { m, n, k, batch, accumulate, residual: false, input, output };
    let mut more = less.clone();
    match u.int_in_range(0..=5)? {
        0 => more.m += u.int_in_range(1..=300)?,
        1 => more.n += u.int_in_range(1..=300)?,
        2 => more.k += u.int_in_range(1..=300)?,
        3 => more.batch += 1,
        4 => more.accumulate = true,
        _ => more.output = DType::F32,
    }
    Ok((Kernel::Gemm(less), Kernel::Gemm(more)))
}

fn attentions(u: &mut Unstructured) -> Result<(Kernel, Kernel)> {
    let heads = u.int_in_range(1..=64)?;
    let less = Attention {
        direction: *u.choose(&[Direction::Forward, Direction::Backward])?,
        sequences: u.int_in_range(1..=8)?,
        length: size(u)?,
        heads,
        kv_heads: u.int_in_range(1..=heads)?,
        head_dim: *u.choose(&[32, 64, 96, 128, 256])?,
        input: dtype(u)?,
        window: None,
        query_parts: 1,
        ring: None,
    };
    let mut more = less.clone();
    match u.int_in_range(0..=3)? {
        0 => more.sequences += 1,
        1 => more.length += u.int_in_range(1..=less.length)?,
        2 => more.heads += 1,
        _ => more.direction = Direction::Backward,
    }
    Ok((Kernel::Attention(less), Kernel::Attention(more)))
}

fn fused_ops(u: &mut Unstructured) -> Result<(Kernel, Kernel)> {
    let traffic = Bytes(size(u)? * size(u)?);
    let unfused_launches = u.int_in_range(1..=12)?;
    let less = FusedKernel {
        kind: FusedKind::Norm,
        traffic,
        unfused_traffic: traffic * u.int_in_range(1..=5)?,
        unfused_launches,
        parameters: 1,
    };
    let extra = Bytes(size(u)?);
    let more = FusedKernel {
        traffic: less.traffic + extra,
        unfused_traffic: less.unfused_traffic + extra,
        ..less.clone()
    };
    Ok((Kernel::Fused(less), Kernel::Fused(more)))
}

fn group(u: &mut Unstructured, mesh: &Mesh) -> Result<DeviceGroup> {
    Ok(mesh.group(*u.choose(&[Axis::Tensor, Axis::Data, Axis::Pipeline])?))
}

fn collectives(u: &mut Unstructured, mesh: &Mesh) -> Result<(Kernel, Kernel)> {
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllGather,
        CollectiveKind::AllToAll,
    ];
    let kind = *u.choose(&kinds)?;
    let payload = Bytes(size(u)? * size(u)?);
    let less = Collective { kind, payload, group: group(u, mesh)? };
    let more = Collective { payload: payload + Bytes(size(u)?), ..less.clone() };
    Ok((Kernel::Collective(less), Kernel::Collective(more)))
}

fn transfers(u: &mut Unstructured, mesh: &Mesh) -> Result<(Kernel, Kernel)> {
    let less = Transfer { bytes: Bytes(size(u)? * size(u)?), group: group(u, mesh)? };
    let more = Transfer { bytes: less.bytes + Bytes(size(u)?), ..less.clone() };
    Ok((Kernel::Transfer(less), Kernel::Transfer(more)))
}

#[test]
fn more_work_is_never_faster() {
    arbtest(|u| {
        let (prices, mesh) = any_prices(u)?;
        let (less, more) = pair(u, &mesh)?;
        let (few, many) = (prices.kernel_time(&less).0, prices.kernel_time(&more).0);
        assert!(few.is_finite() && few >= 0.0 && many.is_finite(), "{less:?}: {few}");
        // Sums in another order may differ in the last bits.
        assert!(few <= many * (1.0 + 1e-12), "{less:?}: {few}\n{more:?}: {many}");
        assert_eq!(few, prices.kernel_time(&less).0);
        assert!(prices.relative_half_width(&less) >= 0.0);
        Ok(())
    })
    .budget_ms(2_000);
}

#[test]
fn no_gemm_exceeds_the_peak_rate_or_the_memory_bandwidth() {
    arbtest(|u| {
        let name = *u.choose(&preset_names().collect::<Vec<_>>())?;
        let profile = preset(name).unwrap();
        let prices = Prices::new(&profile, Executor::Captured, &MESHES[0]);
        let (Kernel::Gemm(gemm), _) = gemms(u)? else { unreachable!() };
        let seconds = prices.kernel_time(&Kernel::Gemm(gemm.clone())).0;
        assert!(gemm.flops().0 / seconds <= profile.peak_flops_per_s(gemm.input));
        let bandwidth = profile.file().device.memory_bandwidth_bytes_per_s;
        assert!(gemm.traffic().as_f64() / seconds <= bandwidth);
        Ok(())
    });
}

#[test]
fn an_all_reduce_takes_no_longer_than_a_reduce_scatter_and_an_all_gather() {
    arbtest(|u| {
        let (prices, mesh) = any_prices(u)?;
        let (payload, group) = (Bytes(size(u)? * size(u)?), group(u, &mesh)?);
        let price =
            |kind| prices.kernel_time(&Kernel::Collective(Collective { kind, payload, group })).0;
        let halves = price(CollectiveKind::ReduceScatter) + price(CollectiveKind::AllGather);
        // Across nodes NCCL's tuner adds a plateau to a ring all-reduce alone.
        assert!(price(CollectiveKind::AllReduce) <= halves * 1.4, "{payload} {group:?}");
        Ok(())
    });
}

#[test]
fn prices_of_extreme_sizes_are_finite() {
    let prices = Prices::new(&preset("a100-80gb").unwrap(), Executor::Eager, &MESHES[0]);
    let huge = u64::MAX;
    let (input, output) = (DType::F32, DType::F32);
    let gemm = Gemm {
        m: huge,
        n: huge,
        k: huge,
        batch: huge,
        accumulate: true,
        residual: false,
        input,
        output,
    };
    assert!(prices.kernel_time(&Kernel::Gemm(gemm)).0.is_finite());
    let empty =
        Gemm { m: 0, n: 0, k: 0, batch: 0, accumulate: false, residual: false, input, output };
    assert!(prices.kernel_time(&Kernel::Gemm(empty)).0 < 2e-5);
    let group = DeviceGroup { axis: Axis::Data, size: huge, stride: huge };
    let kind = CollectiveKind::AllReduce;
    let collective = Collective { kind, payload: Bytes(huge), group };
    let wide = Prices::new(
        &preset("h100-sxm").unwrap(),
        Executor::Eager,
        &Mesh { tensor: 64, pipeline: 1, data: 64, context: 1 },
    );
    assert!(wide.kernel_time(&Kernel::Collective(collective)).0.is_finite());
}

#[test]
fn a_collective_of_one_device_is_free() {
    let prices = Prices::new(&preset("a100-80gb").unwrap(), Executor::Eager, &MESHES[0]);
    let group = DeviceGroup { axis: Axis::Data, size: 1, stride: 4 };
    let (kind, payload) = (CollectiveKind::AllReduce, Bytes(1 << 20));
    let alone = Kernel::Collective(Collective { kind, payload, group });
    assert_eq!(prices.kernel_time(&alone).0, 0.0);
}

#[test]
fn collectives_across_nodes_are_limited_by_network_cards() {
    let a100 = preset("a100-80gb").unwrap();
    let mesh = Mesh { tensor: 4, pipeline: 1, data: 4, context: 1 };
    let prices = Prices::new(&a100, Executor::Captured, &mesh);
    let price = |axis, mib: u64| {
        let (kind, payload) = (CollectiveKind::AllReduce, Bytes(mib * Bytes::MIB));
        let kernel = Kernel::Collective(Collective { kind, payload, group: mesh.group(axis) });
        (prices.kernel_time(&kernel).0, prices.relative_half_width(&kernel))
    };
    let ((inside, narrow), (across, wide)) = (price(Axis::Tensor, 1024), price(Axis::Data, 1024));
    // Four sibling groups share four cards of 25 GB/s: one card each.
    let expected = 1.5 * (1u64 << 30) as f64 / (25e9 * 0.85);
    assert!((across / expected - 1.0).abs() < 0.01, "{across} {expected}");
    assert!(across > 5.0 * inside && wide > narrow);
}

/// Between two nodes a tree sends the payload once over the network cards of a node, where a ring sends it 2(n − 1)/n times.
#[test]
fn all_reduces_of_two_nodes_are_not_limited_as_rings() {
    let a100 = preset("a100-80gb-8-4nic").unwrap();
    let in_cards = |nodes: u64| {
        let mesh = Mesh { tensor: 8 * nodes, pipeline: 1, data: 1, context: 1 };
        let prices = Prices::new(&a100, Executor::Captured, &mesh);
        let (kind, payload) = (CollectiveKind::AllReduce, Bytes(1024 * Bytes::MIB));
        let kernel =
            Kernel::Collective(Collective { kind, payload, group: mesh.group(Axis::Tensor) });
        prices.kernel_time(&kernel).0 / (payload.as_f64() / (4.0 * 25e9 * 0.96))
    };
    let [two, four] = [in_cards(2), in_cards(4)];
    assert!((1.0..1.2).contains(&two), "{two}");
    assert!((2.0 * 31.0 / 32.0..2.0).contains(&four), "{four}");
}

#[test]
fn short_messages_use_a_low_latency_protocol() {
    let a100 = preset("a100-80gb-8").unwrap();
    let mesh = Mesh { tensor: 8, pipeline: 1, data: 1, context: 1 };
    let prices = Prices::new(&a100, Executor::Captured, &mesh);
    let (kind, payload) = (CollectiveKind::AllReduce, Bytes(16 << 10));
    let group = mesh.group(Axis::Tensor);
    let price = prices.kernel_time(&Kernel::Collective(Collective { kind, payload, group })).0;
    // Ring and Simple alone would wait 8.4 + 14 · 3.4 = 56 µs; LL waits 6.6 + 14 · 0.6.
    assert!((14e-6..22e-6).contains(&price), "{price}");
}

#[test]
fn an_eager_executor_launches_every_operator_of_a_fused_op() {
    let a100 = preset("a100-80gb").unwrap();
    let traffic = Bytes(64 * Bytes::MIB);
    let (unfused_traffic, unfused_launches) = (traffic * 4, 6);
    let op = Kernel::Fused(FusedKernel {
        kind: FusedKind::Norm,
        traffic,
        unfused_traffic,
        unfused_launches,
        parameters: 1,
    });
    let price = |executor| Prices::new(&a100, executor, &MESHES[0]).kernel_time(&op).0;
    assert!(price(Executor::Eager) > 3.5 * price(Executor::Captured));
}

/// A window of w keys costs what its scores do: a little more than sequences of w tokens that are as many in all.
#[test]
fn windows_of_attention_are_priced_by_their_scores() {
    let attention = |sequences, length, window| Attention {
        direction: Direction::Forward,
        sequences,
        length,
        heads: 16,
        kv_heads: 16,
        head_dim: 128,
        input: DType::Bf16,
        window,
        query_parts: 1,
        ring: None,
    };
    for (length, window) in [(7, 3), (8, 1), (9, 8), (5, 5), (64, 17)] {
        let visible = (0..length).map(|query| window.min(query + 1)).sum::<u64>() as f64;
        assert_eq!(attention(1, length, Some(window)).scores(), visible);
    }
    for (length, window) in [(24, None), (24, Some(5)), (24, Some(11)), (24, Some(23))] {
        let whole = attention(1, length, window);
        let query_parts = 3;
        let chunk = length / (2 * query_parts);
        let keys = |query: u64| window.unwrap_or(length).min(query + 1);
        let of = |chunk_index: u64| (0..chunk).map(|i| keys(chunk_index * chunk + i)).sum::<u64>();
        let of_device = |device: u64| of(device) + of(2 * query_parts - 1 - device);
        let most = (0..query_parts).map(of_device).max().unwrap() as f64;
        let part = Attention { query_parts, ..whole.clone() };
        assert_eq!(part.scores(), most, "{part:?}");
        assert!(window.is_some() || part.flops().0 * 3.0 == whole.flops().0);
    }
    for name in preset_names() {
        let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 };
        let prices = Prices::new(&preset(name).unwrap(), Executor::Compiled, &mesh);
        let time_s = |attention| prices.kernel_time(&Kernel::Attention(attention)).0;
        let full = time_s(attention(1, 65_536, None));
        let windowed = time_s(attention(1, 65_536, Some(4096)));
        let short = time_s(attention(16, 4096, None));
        // Twice as many scores as those of short sequences, whose average query has half as many keys.
        assert!((1.5..2.0).contains(&(windowed / short)), "{name}: {windowed} {short}");
        assert!(windowed < full / 7.0, "{name}: {windowed} of {full}");
    }
}

/// Along a tensor axis of GPUs and within windows, this runtime, whose executor is captured, computes seven GEMMs backward
/// instead of five, unless attention was measured there.
#[test]
fn own_kernels_of_attention_are_priced_along_a_tensor_axis() {
    let attention = |direction, window| {
        let (sequences, length, heads, head_dim) = (4, 4096, 16, 128);
        let input = DType::Bf16;
        Kernel::Attention(Attention {
            direction,
            sequences,
            length,
            heads,
            kv_heads: heads,
            head_dim,
            input,
            window,
            query_parts: 1,
            ring: None,
        })
    };
    // Times with two devices on the tensor axis over times with two replicas.
    let ratio = |profile: &Profile, executor, direction, window| {
        let time_s = |tensor, data| {
            let mesh = Mesh { tensor, pipeline: 1, data, context: 1 };
            Prices::new(profile, executor, &mesh).kernel_time(&attention(direction, window)).0
        };
        time_s(2, 1) / time_s(1, 2)
    };
    for name in preset_names() {
        let profile = preset(name).unwrap();
        for executor in [Executor::Captured, Executor::Compiled, Executor::Eager] {
            assert_eq!(ratio(&profile, executor, Direction::Forward, None), 1.0, "{name}");
            // Within a window, own kernels run on both meshes.
            let windowed = ratio(&profile, executor, Direction::Backward, Some(1024));
            assert_eq!(windowed, 1.0, "{name}");
            let backward = ratio(&profile, executor, Direction::Backward, None);
            match (name, executor) {
                ("cpu-local", _) | (_, Executor::Compiled | Executor::Eager) => {
                    assert_eq!(backward, 1.0, "{name}");
                }
                // The start of the kernel is the same.
                _ => assert!((1.39..=1.4).contains(&backward), "{name}: {backward}"),
            }
        }
    }
    let mut file = preset("h100-sxm-measured").unwrap().file().clone();
    for point in &mut file.measured.as_mut().unwrap().points {
        if matches!(point.kernel, Kernel::Attention(_)) {
            point.devices = 2;
        }
    }
    let measured = file.resolve().unwrap();
    assert_eq!(ratio(&measured, Executor::Captured, Direction::Backward, None), 1.0);
}
