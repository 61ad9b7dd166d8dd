//! Weights written for and read from other training codes: round trips, shards, and refused files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use narrows_plan::Zero;
use narrows_plan::model::{self, ConfigClass, Model, presets};
use narrows_runtime::interchange::{WeightFormat, fold_weights, import_weights, write_weights};
use narrows_runtime::session::{ModelTensors, TensorKind};
use narrows_runtime::{CounterRng, logical_parameters, random_stream_name};
use safetensors::tensor::{Dtype, TensorView};

use super::support::{mesh, plan, session};

/// A model file of two blocks with these linears, product and number of KV heads.
fn model_of(linears: &str, product: &str, kv_heads: u64, tied: bool) -> Model {
    let text = format!(
        r#"{{"format": "narrows-model/1", "name": "small", "hidden": 16, "vocab": 12, "heads": 4,
        "kv_heads": {kv_heads}, "d_ff": 24, "tied": {tied}, "padding_token": 3, "max_sequence_length": 64,
        "blocks": {{"count": 2, "default": {{"product": "{product}", {linears}}}}}}}"#
    );
    model::read("small.json", &text).unwrap()
}

const SILU: &str = r#""all": {"rank": 6, "activation": "silu"}"#;
const IDENTITY: &str = r#""all": {"rank": 6, "activation": "identity"}"#;
const HALVES: &str = r#""all": {"rank": 6, "activation": "silu"},
    "gate": {"rank": 5}, "up": {"rank": 5}, "down": {"rank": 5}"#;
const DENSE: &str = r#""all": "dense""#;
const MIXED: &str = r#""all": {"rank": 6, "activation": "silu"}, "o": "dense""#;
const CROSSING: &str = r#""all": {"rank": 6, "activation": "silu",
    "crossing": {"form": "released", "gate": "dense"}}"#;

fn random_weights(model: &Model, seed: u64) -> ModelTensors {
    let tensors = logical_parameters(model).into_iter().map(|parameter| {
        let stream = CounterRng::new(seed, &random_stream_name(parameter.id));
        (parameter.id, (0..parameter.elements()).map(|n| stream.normal(n) as f32).collect())
    });
    tensors.collect()
}

#[test]
fn weights_return_from_every_format_to_the_bit() {
    use WeightFormat::{ColaM, HuggingFace, InternLm2, Loro, Nanotron, Phi3};
    for (linears, formats) in [
        (SILU, &[HuggingFace, ColaM, Loro, Nanotron][..]),
        (IDENTITY, &[HuggingFace, ColaM, Loro, Nanotron]),
        (HALVES, &[HuggingFace, ColaM, Loro, Nanotron]),
        (DENSE, &[HuggingFace, Loro, Nanotron, Phi3, InternLm2]),
        (MIXED, &[HuggingFace, Loro]),
        (CROSSING, &[HuggingFace]),
    ] {
        for (kv_heads, tied) in [(4, false), (2, true)] {
            let model = model_of(linears, "plain", kv_heads, tied);
            let weights = random_weights(&model, 7);
            for format in [HuggingFace, ColaM, Loro, Nanotron, Phi3, InternLm2] {
                let folder = tempfile::tempdir().unwrap();
                let written = write_weights(folder.path(), &model, &weights, format);
                assert_eq!(written.is_ok(), formats.contains(&format), "{linears} {format}");
                if written.is_ok() {
                    let imported = import_weights(folder.path(), &model).unwrap();
                    assert_eq!(imported.weights, weights, "{linears} {format}");
                    let recognised =
                        if format == Loro && linears == DENSE { HuggingFace } else { format };
                    assert_eq!(imported.format, recognised, "{linears}");
                }
            }
        }
    }
}

/// Imported weights are whole tensors: a session has them under every plan.
#[test]
fn weights_are_loaded_under_every_plan() {
    let model = model_of(SILU, "plain", 4, true);
    let weights = random_weights(&model, 3);
    let folder = tempfile::tempdir().unwrap();
    write_weights(folder.path(), &model, &weights, WeightFormat::ColaM).unwrap();
    let imported = import_weights(folder.path(), &model).unwrap();
    for (seed, mesh) in [(1, mesh(1, 1, 1)), (2, mesh(2, 1, 2)), (3, mesh(4, 2, 1))] {
        let mut session = session(&model, &plan(&model, seed, mesh, Zero::One));
        session.load_tensors(TensorKind::Weights, &imported.weights).unwrap();
        assert_eq!(session.gather_tensors(TensorKind::Weights).unwrap(), weights, "{mesh:?}");
    }
}

/// Nanotron writes a file for each device of the tensor axis, with the slices of the shard.
#[test]
fn shards_of_nanotron_are_joined() {
    let model = model_of(SILU, "plain", 4, false);
    let weights = random_weights(&model, 5);
    let folder = tempfile::tempdir().unwrap();
    write_weights(folder.path(), &model, &weights, WeightFormat::Nanotron).unwrap();
    let module = folder.path().join("model/model/decoder/1/pp_block/attn/o_proj1");
    let whole = module.join("model_weight.safetensors");
    let bytes = fs::read(&whole).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let data = tensors.tensor("data").unwrap().data().to_vec();
    fs::remove_file(&whole).unwrap();
    // The matrix is 16 × 6; each of two devices has eight rows.
    let shard = |rank: usize| {
        module.join(format!("model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"))
    };
    for rank in 0..2 {
        let rows = &data[rank * 8 * 6 * 4..][..8 * 6 * 4];
        let view = TensorView::new(Dtype::F32, vec![8, 6], rows).unwrap();
        let (start, end) = (rank * 8, rank * 8 + 8);
        let slices = format!("None,None,None|None,None,None#{start},{end},None|None,None,None");
        let metadata = [
            ("version", "1.2".to_owned()),
            ("local_global_slices_pairs", slices),
            ("unsharded_shape", "(16, 6)".to_owned()),
        ];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).into_iter().collect();
        safetensors::serialize_to_file([("data", view)], Some(metadata), &shard(rank)).unwrap();
    }
    assert_eq!(import_weights(folder.path(), &model).unwrap().weights, weights);
    fs::remove_file(shard(1)).unwrap();
    let error = import_weights(folder.path(), &model).unwrap_err().to_string();
    assert!(error.contains("o_proj1.weight: has 96 elements, and its shards have 48"), "{error}");
}

/// A change of the tensors of a file, and words of the message that names the tensor.
type Damage = (fn(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>), &'static str);

#[test]
fn every_defect_names_its_tensor() {
    let model = model_of(SILU, "plain", 4, true);
    let weights = random_weights(&model, 9);
    let folder = tempfile::tempdir().unwrap();
    let file = write_weights(folder.path(), &model, &weights, WeightFormat::HuggingFace).unwrap();
    let bytes = fs::read(&file).unwrap();
    const A: &str = "model.layers.1.mlp.up_proj.cola_a";
    let damages: [Damage; 6] = [
        (|tensors| drop(tensors.remove(A)), "layers.1.mlp.up_proj.cola_a: is missing"),
        (
            |tensors| drop(tensors.insert("bias".into(), (Dtype::F32, vec![1], vec![0; 4]))),
            "bias: is not a tensor of small in the Hugging Face format",
        ),
        (
            |tensors| tensors.get_mut(A).unwrap().1.reverse(),
            "cola_a: has the shape [6, 16], and the model's is [16, 6]",
        ),
        (
            |tensors| {
                let tensor = tensors.get_mut(A).unwrap();
                (tensor.0, tensor.2) = (Dtype::F64, vec![0; 16 * 6 * 8]);
            },
            "cola_a: has elements of type F64 (try: F32, F16 or BF16)",
        ),
        (
            |tensors| {
                let embedding = tensors["model.embed_tokens.weight"].clone();
                tensors.insert("lm_head.weight".into(), embedding);
                tensors.get_mut("lm_head.weight").unwrap().2[0] ^= 1;
            },
            "lm_head.weight: differs from the embedding",
        ),
        (
            |tensors| {
                let tensor = tensors.remove(A).unwrap();
                tensors.insert(A.replace("cola_a", "weight"), tensor);
            },
            "mlp.up_proj.weight: is not a tensor of small",
        ),
    ];
    for (damage, words) in damages {
        let mut tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> =
            safetensors::SafeTensors::deserialize(&bytes)
                .unwrap()
                .iter()
                .map(|(name, view)| {
                    (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
                })
                .collect();
        damage(&mut tensors);
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        safetensors::serialize_to_file(views, None, &file).unwrap();
        let error = import_weights(folder.path(), &model).unwrap_err().to_string();
        assert!(error.contains(words), "{words}\n{error}");
    }
}

/// A fused tensor of another model is named with both shapes, and so is a low-rank model that it cannot hold.
#[test]
fn defects_of_fused_tensors_name_them() {
    for (format, fused) in [
        (WeightFormat::Phi3, "model.layers.0.self_attn.qkv_proj.weight"),
        (WeightFormat::InternLm2, "model.layers.0.attention.wqkv.weight"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = model_of(DENSE, "swiglu", 2, false);
        write_weights(folder.path(), &model, &random_weights(&model, 2), format).unwrap();
        let refused = |model: &Model| import_weights(folder.path(), model).unwrap_err().to_string();
        let error = refused(&model_of(DENSE, "swiglu", 4, false));
        let words = format!("{fused}: has the shape [32, 16], and the model's is [48, 16]");
        assert!(error.contains(&words), "{error}");
        let error = refused(&model_of(SILU, "swiglu", 2, false));
        let words = format!("layer 0 q: is a factor pair, and the {format} format has dense");
        assert!(error.contains(&words), "{error}");
    }
}

/// Weights that a tied model stores twice, and frequencies that older versions store, are accepted.
#[test]
fn redundant_tensors_are_accepted() {
    let model = model_of(SILU, "plain", 4, true);
    let weights = random_weights(&model, 9);
    let folder = tempfile::tempdir().unwrap();
    let file = write_weights(folder.path(), &model, &weights, WeightFormat::HuggingFace).unwrap();
    let bytes = fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut views: Vec<(String, TensorView)> =
        tensors.iter().map(|(name, view)| (name.to_owned(), view)).collect();
    let embedding = tensors.tensor("model.embed_tokens.weight").unwrap();
    views.push(("lm_head.weight".to_owned(), embedding));
    let frequencies = TensorView::new(Dtype::F32, vec![2], &[0; 8]).unwrap();
    views.push(("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), frequencies));
    safetensors::serialize_to_file(views, None, &file).unwrap();
    assert_eq!(import_weights(&file, &model).unwrap().weights, weights);
}

#[test]
fn paths_without_weights_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = presets::find("cola-tiny").unwrap();
    let at = |name: &str| folder.path().join(name);
    let refused = |path: &Path, words: &str| {
        let error = import_weights(path, &model).unwrap_err().to_string();
        assert!(error.contains(words), "{words}\n{error}");
    };
    refused(&at("absent.safetensors"), "cannot be opened");
    refused(folder.path(), "has neither model.safetensors");
    fs::write(at("pytorch_model.bin"), "").unwrap();
    refused(folder.path(), "safe_serialization=True");
    fs::write(at("short.safetensors"), "short").unwrap();
    refused(&at("short.safetensors"), "is not a safetensors file: has 5 bytes");
    fs::write(at("long.safetensors"), [255; 64]).unwrap();
    refused(&at("long.safetensors"), "its header would have");
    fs::write(at("text.safetensors"), "\x04\0\0\0\0\0\0\0{{{{").unwrap();
    refused(&at("text.safetensors"), "is not a safetensors file");
    let header = r#"{"a": {"dtype": 7, "shape": [], "data_offsets": [0, 0]}}"#;
    fs::write(at("untyped.safetensors"), file_of(header, 0)).unwrap();
    refused(
        &at("untyped.safetensors"),
        "safetensors file: a: dtype: expected a name, or an object",
    );
    fs::write(at("model.safetensors.index.json"), r#"{"weight_map": {"a": "../b"}}"#).unwrap();
    refused(folder.path(), "`../b`, which is not a file of its folder");
}

/// A safetensors file with this header and as many bytes of data.
fn file_of(header: &str, data_bytes: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data_bytes]].concat()
}

/// The format permits neither gaps nor overlaps nor data after the last tensor, and a reader that takes the first of two
/// equal names reads another tensor than one that takes the last.
#[test]
fn files_whose_header_contradicts_their_data_are_refused() {
    let model = presets::find("cola-tiny").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let tensor = |name: &str, elements: u64, start: u64, end: u64| {
        format!(
            r#""{name}": {{"dtype": "F32", "shape": [{elements}], "data_offsets": [{start}, {end}]}}"#
        )
    };
    for (tensors, data_bytes, words) in [
        ([tensor("a", 1, 0, 4), tensor("b", 1, 4, 8)], 8, "is not a tensor of cola-tiny"),
        (
            [tensor("a", 1, 0, 4), tensor("b", 1, 4, 8)],
            9,
            "b: is the last tensor, and the file has 1 byte after",
        ),
        (
            [tensor("a", 1, 0, 4), tensor("b", 1, 4, 8)],
            7,
            "b: ends at byte 8 of the data, and the file has 7",
        ),
        (
            [tensor("a", 1, 0, 4), tensor("b", 1, 8, 12)],
            12,
            "b: begins at byte 8 of the data, and the tensor before",
        ),
        (
            [tensor("a", 2, 0, 8), tensor("b", 1, 4, 8)],
            8,
            "b: begins at byte 4 of the data, within the tensor",
        ),
        (
            [tensor("a", 1, 0, 4), tensor("b", 2, 4, 8)],
            8,
            "b: has the offsets (4, 8), and another size by its shape",
        ),
        ([tensor("a", 1, 4, 8), tensor("a", 1, 0, 4)], 4, "key `a` is repeated"),
        ([tensor("a", 1, 0, 4), tensor("a", 1, 0, 4)], 4, "key `a` is repeated"),
    ] {
        fs::write(&file, file_of(&format!("{{{}}}", tensors.join(", ")), data_bytes)).unwrap();
        let error = import_weights(&file, &model).unwrap_err().to_string();
        assert!(error.starts_with(&file.display().to_string()), "{error}");
        assert!(error.contains(words), "{words}\n{error}");
    }
}

#[test]
fn an_index_that_contradicts_its_files_is_refused() {
    let model = model_of(SILU, "plain", 4, false);
    let weights = random_weights(&model, 9);
    let folder = tempfile::tempdir().unwrap();
    let whole = write_weights(folder.path(), &model, &weights, WeightFormat::HuggingFace).unwrap();
    let bytes = fs::read(&whole).unwrap();
    fs::remove_file(&whole).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut weight_map: BTreeMap<&str, &str> = BTreeMap::new();
    for (file, is_norm) in [("norms.safetensors", true), ("matrices.safetensors", false)] {
        let of_file = || tensors.iter().filter(|(name, _)| name.contains("norm") == is_norm);
        safetensors::serialize_to_file(of_file(), None, &folder.path().join(file)).unwrap();
        weight_map.extend(
            tensors
                .names()
                .into_iter()
                .filter(|name| name.contains("norm") == is_norm)
                .map(|name| (name, file)),
        );
    }
    let import = |index: &str| {
        let text = format!(r#"{{"weight_map": {index}}}"#);
        fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
        import_weights(folder.path(), &model)
    };
    let text = |map: &BTreeMap<&str, &str>| serde_json::to_string(map).unwrap();
    assert_eq!(import(&text(&weight_map)).unwrap().weights, weights);
    const NORM: &str = "model.norm.weight";
    let with = |name, file| {
        let mut map = weight_map.clone();
        map.insert(name, file);
        text(&map)
    };
    let unlisted = {
        let mut map = weight_map.clone();
        map.remove(NORM);
        text(&map)
    };
    let twice =
        text(&weight_map).replacen('{', r#"{"model.norm.weight": "matrices.safetensors", "#, 1);
    for (index, words) in [
        (
            with(NORM, "matrices.safetensors"),
            "model.norm.weight: is not in matrices.safetensors, where the index has it",
        ),
        (
            with(NORM, "matrices.safetensors"),
            "model.norm.weight: is in norms.safetensors, and the index has it in matrices",
        ),
        (
            with("absent", "norms.safetensors"),
            "absent: is not in norms.safetensors, where the index has it",
        ),
        (unlisted, "model.norm.weight: is in norms.safetensors, and not in the index"),
        (twice, "weight_map: key `model.norm.weight` is repeated"),
    ] {
        let error = import(&index).unwrap_err().to_string();
        assert!(error.contains("model.safetensors.index.json"), "{error}");
        assert!(error.contains(words), "{words}\n{error}");
    }
}

/// Factors of finite weights have no product in f32 where it is too large.
#[test]
fn products_beyond_the_range_of_weights_are_refused() {
    let model = model_of(IDENTITY, "swiglu", 2, false);
    let mut weights = random_weights(&model, 2);
    for (id, tensor) in &mut weights {
        if id.to_string().starts_with("layer 1 k.") {
            tensor.fill(3e38);
        }
    }
    let refused = fold_weights(&model, weights).unwrap_err();
    assert_eq!(refused.to_string(), "layer 1 k");
}

/// The dense weights of a folded model compute the same function, and a class that is written reads as an equal
/// model.
#[test]
fn folded_pairs_are_the_products_of_their_factors() {
    let model = model_of(IDENTITY, "swiglu", 2, false);
    let weights = random_weights(&model, 2);
    let folded = model.folded().unwrap();
    let dense = fold_weights(&model, weights.clone()).unwrap();
    let sizes: ModelTensors = logical_parameters(&folded)
        .iter()
        .map(|p| (p.id, vec![0.0; p.elements() as usize]))
        .collect();
    assert_eq!(
        dense.iter().map(|(id, tensor)| (*id, tensor.len())).collect::<Vec<_>>(),
        sizes.iter().map(|(id, tensor)| (*id, tensor.len())).collect::<Vec<_>>()
    );
    let id =
        |name: &str| *dense.keys().chain(weights.keys()).find(|id| id.to_string() == name).unwrap();
    let (a, b, product) =
        (&weights[&id("layer 1 k.a")], &weights[&id("layer 1 k.b")], &dense[&id("layer 1 k")]);
    for (row, column) in [(0, 0), (3, 7), (15, 5)] {
        let sum: f64 =
            (0..6).map(|n| f64::from(a[row * 6 + n]) * f64::from(b[n * 8 + column])).sum();
        assert_eq!(product[row * 8 + column], sum as f32);
    }
    let config = folded.hugging_face_config(ConfigClass::Llama).unwrap();
    assert_eq!(model::read("small", &config.to_string()).unwrap(), folded);
}
