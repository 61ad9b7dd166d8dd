//! Profile files: presets satisfy the schema, and every defect of a bad profile names its field.

use arbtest::arbtest;
use narrows_cost_model::profile::{
    self, KernelMeasurements, ProfileFile, preset, preset_names, read, schema,
};
use narrows_cost_model::{Executor, Prices, scale_measurements};
use narrows_plan::kernel::{Gemm, Kernel};
use narrows_plan::{DType, Defects, Mesh};
use serde_json::{Value, json};

const A100: &str = include_str!("../../profiles/a100-80gb.json");

/// Every file under profiles/, by name.
fn files() -> Vec<(String, Value)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../profiles");
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let json = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    json.map(|path| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        (name, serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    })
    .collect()
}

/// The defects of a100-80gb with `value` at `pointer`.
fn defects_with(pointer: &str, value: Value) -> Defects {
    let mut file: Value = serde_json::from_str(A100).unwrap();
    *file.pointer_mut(pointer).unwrap() = value;
    read(&file.to_string()).expect_err("a defect")
}

#[test]
fn every_file_is_a_preset_and_satisfies_the_schema() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    let mut names: Vec<String> = Vec::new();
    for (name, value) in files() {
        let errors: Vec<String> = validator.iter_errors(&value).map(|e| e.to_string()).collect();
        assert!(errors.is_empty(), "{name}: {errors:?}");
        assert_eq!(preset(&name).unwrap().name(), name);
        names.push(name);
    }
    let mut presets: Vec<&str> = preset_names().collect();
    names.sort();
    presets.sort();
    assert_eq!(names, presets);
}

#[test]
fn the_schema_and_the_reader_reject_the_same_files() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    for (pointer, value) in [
        ("/format", json!("narrows-profile/2")),
        ("/precision", json!("fp8")),
        ("/device/memory_bytes", json!("80 GB")),
        ("/gemm", json!({})),
        ("/links/library", json!("gloo")),
    ] {
        let mut file: Value = serde_json::from_str(A100).unwrap();
        *file.pointer_mut(pointer).unwrap() = value;
        assert!(!validator.is_valid(&file), "{pointer}");
        assert!(read(&file.to_string()).is_err(), "{pointer}");
    }
}

#[test]
fn profiles_round_trip_through_json() {
    for (name, _) in files() {
        let profile = preset(&name).unwrap();
        let text = serde_json::to_string(profile.file()).unwrap();
        assert_eq!(read(&text).unwrap(), profile);
    }
}

#[test]
fn defects_name_their_field() {
    for (pointer, value, field) in [
        ("/gemm/efficiency_max", json!(1.2), "gemm.efficiency_max"),
        ("/gemm/efficiency_max", json!(0.0), "gemm.efficiency_max"),
        ("/gemm/tiles/2/rows", json!(0), "gemm.tiles[2].rows"),
        ("/gemm/tiles", json!([]), "gemm.tiles"),
        ("/device/memory_bytes", json!(0), "device.memory_bytes"),
        ("/device/reserve/bytes", json!(1u64 << 50), "device.reserve.bytes"),
        ("/overlap/compute_slowdown", json!(0.9), "overlap.compute_slowdown"),
        ("/overlap/collective_slowdown", json!(11.0), "overlap.collective_slowdown"),
        ("/device/peak_flops_per_s/bf16", json!(-1.0), "device.peak_flops_per_s.bf16"),
        ("/attention/forward/1/length", json!(1), "attention.forward[1].length"),
        ("/attention/forward/0/efficiency", json!(0.01), "attention.forward[1].efficiency"),
        ("/passes/start_s", json!(-1e-9), "passes.start_s"),
        ("/links/devices_per_node", json!(0), "links.devices_per_node"),
        ("/links/inter_node/efficiency", json!(2), "links.inter_node.efficiency"),
        ("/executors/eager/provenance/date", json!("May"), "executors.eager.provenance.date"),
        ("/device/provenance/source", json!(" "), "device.provenance.source"),
        ("/device/provenance/source", json!("a\nb"), "device.provenance.source"),
        ("/name", json!("A 100"), "name"),
        ("/description", json!("\u{1b}[31mred"), "description"),
        (
            "/gemm/provenance",
            json!({"kind": "published", "source": "s", "date": "2026-11-21", "assumed": ["magic"]}),
            "gemm.provenance.assumed",
        ),
        ("/gemm/relative_error/residuals/3", json!(99.0), "gemm.relative_error.residuals[3]"),
        (
            "/executors/eager/step_error/half_width_90",
            json!(-1),
            "executors.eager.step_error.half_width_90",
        ),
        ("/refits/fitted", json!([0.9]), "refits.fitted"),
        ("/refits/draws/0", json!([0.9]), "refits.draws[0]"),
        ("/refits/draws/1/0", json!(2.0), "refits.draws[1]"),
        ("/refits/kernels", json!([]), "refits.kernels"),
        // From here on serde finds the defect.
        ("/refits/numbers/0", json!("gemm.magic"), "refits.numbers[0]"),
        ("/gemm/efficiency_max", json!("high"), "gemm.efficiency_max"),
        ("/gemm/tiles/1", json!({"rows": 1, "depth": 2}), "gemm.tiles[1].depth"),
        ("/links/library", json!("gloo"), "links.library"),
    ] {
        let defects = defects_with(pointer, value);
        assert!(defects.0.iter().any(|defect| defect.field == field), "{field}: {defects}");
    }
}

/// A small profile with measurements.
fn measured() -> Value {
    let point = |m: u64| {
        json!({"kernel": {"gemm": {"m": m, "n": 8, "k": 8, "batch": 1, "accumulate": false,
            "input": "f32", "output": "f32"}}, "devices": 1, "time_s": 1e-3, "spread": 0.0})
    };
    let mut file: Value =
        serde_json::from_str(include_str!("../../profiles/cpu-local.json")).unwrap();
    file["measured"] = json!({
        "threads": 2,
        "repeatability": {"rounds": 2, "rounds_apart_median": 0.1, "rounds_apart_90": 0.2, "undisturbed": 1.02},
        "points": [point(8), point(16)],
        "provenance": {"kind": "measured", "source": "a test", "date": "2026-11-22"},
    });
    file
}

#[test]
fn invalid_measurements_are_rejected() {
    let good = measured();
    read(&good.to_string()).unwrap();
    let again = good["measured"]["points"][0].clone();
    let a100: Value = serde_json::from_str(A100).unwrap();
    let mut twice = a100["refits"].clone();
    twice["kernels"][1] = twice["kernels"][0].clone();
    for (pointer, value, part) in [
        (
            "/measured/repeatability/undisturbed",
            json!(5),
            "measured.repeatability.undisturbed: 5 is not between",
        ),
        (
            "/measured/points/1",
            again,
            "measured.points[1]: repeats the kernel of measured.points[0]",
        ),
        (
            "/measured/points/1/kernel",
            json!({"attention": {
                "direction": "forward", "sequences": 1, "length": 64, "heads": 2, "kv_heads": 2, "head_dim": 8,
                "input": "f32", "query_parts": 2, "ring": {"axis": "context", "size": 2, "stride": 1}
            }}),
            "measured.points[1].kernel: ring attention is priced by its steps",
        ),
        (
            "/measured/points/1/kernel",
            json!({"attention": {
                "direction": "forward", "sequences": 1, "length": 64, "heads": 2, "kv_heads": 2, "head_dim": 8,
                "input": "f32", "query_parts": 0
            }}),
            "measured.points[1].kernel.query_parts: 64 tokens are not two equal chunks",
        ),
        (
            "/measured/provenance/kind",
            json!("assumed"),
            "measured.provenance.kind: `measured` holds measurements only",
        ),
        (
            "/refits",
            a100["refits"].clone(),
            "refits: numbers cannot be fitted both to published figures",
        ),
        ("/refits", twice, "refits.kernels[1]: repeats the kernel of refits.kernels[0]"),
        ("/gemm/start_s", json!(1e300), "gemm.start_s: 1e300 is not between 0 and 10"),
    ] {
        let mut file = good.clone();
        match file.pointer_mut(pointer) {
            Some(place) => *place = value,
            None => file["refits"] = value,
        }
        let defects = read(&file.to_string()).expect_err(part).to_string();
        assert!(defects.contains(part), "{part}: {defects}");
    }
    let mut other_devices = good.clone();
    other_devices["measured"]["points"][1] = good["measured"]["points"][0].clone();
    other_devices["measured"]["points"][1]["devices"] = json!(2);
    read(&other_devices.to_string()).unwrap();
}

/// A change of the hardware changes corrected prices by the same factor as the prices of the curves, also for measured
/// shapes.
#[test]
fn measured_prices_follow_changed_hardware() {
    let changes: [fn(&mut ProfileFile); 3] = [
        |file| file.gemm.efficiency_max /= 3.0,
        |file| file.device.memory_bandwidth_bytes_per_s /= 5.0,
        |file| file.gemm.start_s *= 7.0,
    ];
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 };
    for threads in [json!(2), Value::Null] {
        let mut value = measured();
        value["measured"]["threads"] = threads;
        let base = read(&value.to_string()).unwrap().file().clone();
        for executor in [Executor::Captured, Executor::Eager] {
            let time_s = |file: &ProfileFile, m: u64| {
                let (input, output) = (DType::F32, DType::F32);
                let gemm = Gemm {
                    m,
                    n: 8,
                    k: 8,
                    batch: 1,
                    accumulate: false,
                    residual: false,
                    input,
                    output,
                };
                Prices::from_file(file, executor, &mesh).kernel_time(&Kernel::Gemm(gemm)).0
            };
            let gap_s = |file: &ProfileFile| match file.measured {
                Some(KernelMeasurements { threads: None, .. }) => {
                    Prices::from_file(file, executor, &mesh).launch_gap().0
                }
                _ => 0.0,
            };
            for change in changes {
                let mut changed = base.clone();
                change(&mut changed);
                let unscaled_s = time_s(&changed, 8);
                scale_measurements(&mut changed, &base, executor);
                let curves = |file: &ProfileFile| ProfileFile { measured: None, ..file.clone() };
                for m in [8, 11, 16] {
                    let corrected =
                        (time_s(&changed, m) - gap_s(&changed)) / (time_s(&base, m) - gap_s(&base));
                    let smooth = (time_s(&curves(&changed), m) - gap_s(&changed))
                        / (time_s(&curves(&base), m) - gap_s(&base));
                    assert!((corrected / smooth - 1.0).abs() < 1e-3, "{m}: {corrected}, {smooth}");
                }
                assert!((unscaled_s / time_s(&base, 8) - 1.0).abs() < 0.1, "a measured time stays");
            }
        }
    }
}

#[test]
fn relative_errors_far_above_one_are_accepted() {
    let mut file = measured();
    file["gemm"]["relative_error"]["half_width_90"] = json!(1234.5);
    let profile = read(&file.to_string()).unwrap();
    assert_eq!(profile.file().gemm.relative_error.half_width_90, 1234.5);
}

#[test]
fn all_defects_are_reported_at_once() {
    let mut file = preset("a100-80gb").unwrap().file().clone();
    file.gemm.efficiency_max = f64::NAN;
    file.fused.efficiency = f64::INFINITY;
    file.links.intra_node.bandwidth_bytes_per_s = -1.0;
    file.attention.backward.clear();
    let fields: Vec<String> = file.resolve().unwrap_err().0.into_iter().map(|d| d.field).collect();
    assert_eq!(
        fields,
        [
            "gemm.efficiency_max",
            "attention.backward",
            "passes.efficiency",
            "links.intra_node.bandwidth_bytes_per_s"
        ]
    );
}

#[test]
fn an_unknown_preset_name_suggests_similar_names() {
    assert_eq!(
        preset("a100-80gB-4").unwrap_err().to_string(),
        "hardware: there is no hardware profile called `a100-80gB-4` (try: a100-80gb, a100-80gb-8, or the \
         path of a profile file)"
    );
    assert!(preset("tpu").unwrap_err().to_string().contains("h200-sxm"));
}

#[test]
fn the_fingerprint_covers_numbers_only() {
    let a100 = preset("a100-80gb").unwrap();
    let with = |change: fn(&mut ProfileFile)| {
        let mut file = a100.file().clone();
        change(&mut file);
        file.resolve().unwrap().fingerprint().to_string()
    };
    assert_eq!(a100.fingerprint().len(), 64);
    assert_eq!(with(|file| file.gemm.provenance.source.push('!')), a100.fingerprint());
    assert_eq!(with(|file| file.description.clear()), a100.fingerprint());
    assert_eq!(with(|file| file.price_per_device_hour = Some(2.0)), a100.fingerprint());
    assert_ne!(with(|file| file.gemm.start_s *= 1.01), a100.fingerprint());
    assert_ne!(with(|file| file.links.devices_per_node = 8), a100.fingerprint());
}

#[test]
fn assumed_values_are_labelled() {
    let h100 = preset("h100-sxm").unwrap();
    let assumed = h100.assumed_paths();
    for path in ["gemm.exposed_epilogue", "passes", "links.intra_node", "links.inter_node"] {
        assert!(assumed.iter().any(|known| known == path), "{path}");
    }
    for path in ["gemm", "gemm.efficiency_max", "attention"] {
        assert!(!assumed.iter().any(|known| known == path), "published: {path}");
    }
    let network = preset("a100-80gb-8-4nic").unwrap().assumed_paths();
    let of_network = |field: &str| network.contains(&format!("links.inter_node{field}"));
    assert!(!of_network("") && !of_network(".efficiency"), "fitted: {network:?}");
    assert!(of_network(".nics_per_node") && of_network(".bandwidth_bytes_per_s"), "{network:?}");
    let a100 = preset("a100-80gb").unwrap().assumed_paths();
    assert!(!a100.contains(&"gemm".to_string()));
    assert!(a100.contains(&"gemm.memory_efficiency".to_string()), "{a100:?}");
    assert!(a100.contains(&"links.intra_node.fill_half_bytes".to_string()), "{a100:?}");
}

/// Replaces random values of a valid profile by random values of random types.
#[test]
fn bad_profiles_never_panic() {
    let good: Value = serde_json::from_str(A100).unwrap();
    let mut pointers = Vec::new();
    collect(&good, String::new(), &mut pointers);
    arbtest(|u| {
        let mut file = good.clone();
        for _ in 0..u.int_in_range(1..=3)? {
            let Some(place) = file.pointer_mut(u.choose(&pointers)?) else { continue };
            *place = match u.int_in_range(0..=5)? {
                0 => json!(u.arbitrary::<f64>()?),
                1 => json!(u.arbitrary::<u64>()?),
                2 => json!(u.arbitrary::<i32>()?),
                3 => json!(u.arbitrary::<String>()?),
                4 => json!([]),
                _ => Value::Null,
            };
        }
        if let Err(defects) = read(&file.to_string()) {
            assert!(!defects.0.is_empty());
            for defect in defects.0 {
                let pointer =
                    format!("/{}", defect.field.replace(['.', '['], "/").replace(']', ""));
                let whole = defect.field.is_empty() || defect.problem.starts_with("is missing");
                assert!(whole || file.pointer(&pointer).is_some(), "{defect}");
            }
        }
        Ok(())
    });
}

/// Truncated or otherwise damaged text is an error and never a panic.
#[test]
fn damaged_text_never_panics() {
    arbtest(|u| {
        let mut bytes = A100.as_bytes().to_vec();
        bytes.truncate(u.int_in_range(0..=A100.len())?);
        if !bytes.is_empty() {
            let at = u.int_in_range(0..=bytes.len() - 1)?;
            bytes[at] = u.arbitrary()?;
        }
        let _ = profile::read(&String::from_utf8_lossy(&bytes));
        Ok(())
    });
}

fn collect(value: &Value, path: String, pointers: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, v)| collect(v, format!("{path}/{key}"), pointers));
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, v)| collect(v, format!("{path}/{i}"), pointers));
        }
        _ => {}
    }
    pointers.push(path);
}

/// Plans name the fingerprint of their profile: a change here makes every plan on disk stale.
#[test]
fn fingerprints_of_presets_are_unchanged() {
    let expected = [
        ("a100-40gb", "55d497f1b17655958b5ff97d57a3e573d7818236adb233ce0ac3387e5f11447f"),
        ("a100-80gb", "cec9936f864d11bba932ed64e30356f2d0cea1c4c9b2e1d381f5a11ae3231cb4"),
        ("a100-80gb-8", "91b476a0ba06980f9144be823b44ea11bcf0ab439112ec6213ef2f3ae26c486c"),
        ("a100-80gb-8-4nic", "af74d2d6c277cbd1cfc019ce899c04034f2f6c1c7852b642d16eee0a45ffb47e"),
        ("cpu-local", "1843f2be9a41b8a110f03740c6c7ced6287002c404f37169d341c7b89ef4903e"),
        ("h100-sxm", "10f9d7a3c8f9efd0aae6d69a934a6f71cfcec9fb42317c8db37aff060be2f3e7"),
        ("h100-sxm-measured", "7b3cfbd27b0c6d6d6663d625f9f98a307c4bbcd077ae9207ca368b188c6b08fc"),
        ("h200-sxm", "0181c8d28a6533fe0a2da15e94c29f147886e35731a5a92f7489bc5751ff9697"),
    ];
    let mut names: Vec<&str> = preset_names().collect();
    names.sort();
    assert_eq!(names, expected.map(|(name, _)| name));
    let profiles = expected.map(|(name, _)| (name, preset(name).unwrap()));
    let fingerprints = profiles.each_ref().map(|(name, profile)| (*name, profile.fingerprint()));
    assert_eq!(fingerprints, expected);
}
