//! A file, a folder of files with an index, or a Nanotron checkpoint, as one set of tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use narrows_plan::{Defect, Defects, json};
use serde::Deserialize;

use super::error::WeightsError;
use super::nanotron_folder::{self, SlicePair, TENSOR, shard_of};
use super::safetensors_file::SafetensorsFile;

/// File of all tensors in a folder, as Hugging Face names it.
const SINGLE: &str = "model.safetensors";
/// Index of several files in a folder, as Hugging Face names it.
const INDEX: &str = "model.safetensors.index.json";

/// Tensors by name, in one or several files.
pub(super) struct WeightSource {
    path: PathBuf,
    files: Vec<SafetensorsFile>,
    tensors: BTreeMap<String, SourceTensor>,
}

/// A tensor, whole in one file or in shards.
struct SourceTensor {
    shape: Vec<u64>,
    pieces: Vec<Piece>,
}

/// A tensor in a file, which is a whole tensor or a shard of one.
struct Piece {
    file: usize,
    name: String,
    /// Place in the whole tensor; `None` when the piece is the whole.
    slices: Option<Vec<SlicePair>>,
}

/// An index of tensors in several files.
#[derive(Deserialize)]
struct Index {
    #[serde(deserialize_with = "json::without_repeated_keys")]
    weight_map: BTreeMap<String, String>,
}

impl WeightSource {
    /// Opens a safetensors file, an index, or a folder with one of them or with a Nanotron checkpoint.
    ///
    /// # Errors
    /// A path that is none of these, and files that cannot be read.
    pub fn open(path: &Path) -> Result<WeightSource, WeightsError> {
        let mut source =
            WeightSource { path: path.to_path_buf(), files: vec![], tensors: BTreeMap::new() };
        if !path.is_dir() {
            match path.extension().is_some_and(|extension| extension == "json") {
                true => source.add_index(path)?,
                false => source.add_file(path)?,
            }
        } else if path.join(INDEX).exists() {
            source.add_index(&path.join(INDEX))?;
        } else if path.join(SINGLE).exists() {
            source.add_file(&path.join(SINGLE))?;
        } else if path.join("model").is_dir() {
            source.add_nanotron_folder(&path.join("model"))?;
        } else {
            let problem =
                format!("has neither {SINGLE}, {INDEX} nor the folder `model` of Nanotron");
            let hint = match path.join("pytorch_model.bin").exists() {
                true => "`save_pretrained(…, safe_serialization=True)`, which writes safetensors",
                false => "the folder of one checkpoint, or a safetensors file",
            };
            return Err(WeightsError::of_file(path, problem, hint));
        }
        Ok(source)
    }

    /// The names of all tensors, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Shape of a tensor; `None` without such a tensor.
    pub fn shape(&self, name: &str) -> Option<&[u64]> {
        self.tensors.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// The elements of a tensor, row-major.
    ///
    /// # Errors
    /// A tensor that is missing, of an unsupported type, damaged, or not covered by its shards.
    pub fn read(&self, name: &str) -> Result<Vec<f32>, Defect> {
        let tensor = self.tensors.get(name).ok_or_else(|| Defect::new(name, "is missing"))?;
        let mut whole = vec![];
        let mut covered = 0;
        for Piece { file, name: in_file, slices } in &tensor.pieces {
            let file = &self.files[*file];
            let elements =
                file.read(in_file).map_err(|defect| Defect { field: name.to_owned(), ..defect })?;
            let Some(slices) = slices else { return Ok(elements) };
            let sizes: Vec<usize> = tensor.shape.iter().map(|size| *size as usize).collect();
            whole.resize(sizes.iter().product(), 0.0);
            let shape = file.metadata.info(in_file).map_or(&[][..], |info| &info.shape);
            for pair in slices {
                let copied = pair.copy((&elements, shape), (&mut whole, &sizes));
                covered += copied.ok_or_else(|| {
                    let file = file.path.display();
                    Defect::new(name, format!("has slices of different sizes in {file}"))
                })?;
            }
        }
        if covered != whole.len() {
            let problem = format!("has {} elements, and its shards have {covered}", whole.len());
            return Err(Defect::new(name, problem).hint("the files of all ranks of one checkpoint"));
        }
        Ok(whole)
    }

    fn add_file(&mut self, path: &Path) -> Result<(), WeightsError> {
        let file = SafetensorsFile::open(path)?;
        for (name, info) in file.metadata.tensors() {
            let shape = info.shape.iter().map(|size| *size as u64).collect();
            let piece = Piece { file: self.files.len(), name: name.clone(), slices: None };
            self.tensors.insert(name, SourceTensor { shape, pieces: vec![piece] });
        }
        self.files.push(file);
        Ok(())
    }

    fn add_index(&mut self, path: &Path) -> Result<(), WeightsError> {
        let text = fs::read_to_string(path).map_err(WeightsError::io(path, "read"))?;
        let Index { weight_map } = json::read(&text).map_err(|defect| {
            let problem = format!("is not an index of safetensors files: {defect}");
            WeightsError::of_file(path, problem, "an index with a `weight_map`")
        })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut present = BTreeSet::new();
        for file in weight_map.values().collect::<BTreeSet<_>>() {
            let within = Path::new(file).components();
            if !within.into_iter().all(|part| matches!(part, Component::Normal(_))) {
                let problem = format!("names `{file}`, which is not a file of its folder");
                return Err(WeightsError::of_file(
                    path,
                    problem,
                    "names of files beside the index",
                ));
            }
            self.add_file(&folder.join(file))?;
            let tensors = self.files.last().map(|file| file.metadata.tensors());
            present.extend(tensors.into_iter().flatten().map(|(name, _)| (name, file.clone())));
        }
        let listed: BTreeSet<(String, String)> = weight_map.clone().into_iter().collect();
        let mut defects = Defects::default();
        for (name, file) in listed.difference(&present) {
            let problem = format!("is not in {file}, where the index has it");
            defects.push(Defect::new(name, problem));
        }
        for (name, file) in present.difference(&listed) {
            let problem = match weight_map.get(name) {
                Some(listed) => format!("is in {file}, and the index has it in {listed}"),
                None => format!("is in {file}, and not in the index"),
            };
            defects.push(Defect::new(name, problem));
        }
        defects.into_result(()).map_err(|defects| WeightsError::new(path, defects))
    }

    fn add_nanotron_folder(&mut self, folder: &Path) -> Result<(), WeightsError> {
        let files = nanotron_folder::list(folder)?;
        if files.is_empty() {
            let hint = "the folder of one checkpoint, such as `checkpoints/1000`";
            return Err(WeightsError::of_file(&self.path, "has no tensors of Nanotron", hint));
        }
        for (name, path) in files {
            let file = SafetensorsFile::open(&path)?;
            let Some(info) = file.metadata.info(TENSOR) else {
                let problem = format!("has no tensor `{TENSOR}`");
                let hint = "the files of a Nanotron checkpoint";
                return Err(WeightsError::of_file(&path, problem, hint));
            };
            let local_shape = info.shape.iter().map(|size| *size as u64).collect();
            let (shape, slices) = match shard_of(&file.metadata) {
                Some((shape, slices)) => (shape, Some(slices)),
                None => (local_shape, None),
            };
            let piece = Piece { file: self.files.len(), name: TENSOR.to_owned(), slices };
            self.files.push(file);
            let tensor = self.tensors.entry(name);
            let tensor = tensor.or_insert_with(|| SourceTensor { shape, pieces: vec![] });
            tensor.pieces.push(piece);
        }
        Ok(())
    }
}
