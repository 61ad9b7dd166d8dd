//! Checkpoints that all processes of a run [write](super::pending_save) at once, and of which each reads what its device
//! needs.
//!
//! | file | contents |
//! |---|---|
//! | `model-00001-of-00004.safetensors` | the slices of weights that the first of four processes holds |
//! | `optimizer-00001-of-00004.safetensors` | its slices of both moments |
//! | `state.json`, `manifest.json` | as in other checkpoints; the manifest makes all files one checkpoint |
//!
//! A tensor of a shard is a [`TensorSlice`] of the tensor of that name, with one dimension. The metadata `slices` of its
//! file says which elements it has. Slices have the orientation of the program, in which no matrix is transposed.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use narrows_plan::model::{Model, ParameterId};
use safetensors::tensor::Dtype;

use super::error::{CheckpointError, CheckpointFault, TensorFault};
use super::format::{
    FIRST_MOMENT_SUFFIX, MODEL_SHARD, OPTIMIZER_SHARD, SECOND_MOMENT_SUFFIX, WEIGHT_SUFFIX,
    is_shard,
};
use super::manifest::{Manifest, check_run};
use super::names::{StoredParameter, stored_parameters};
use super::tensors::FileHeader;
use crate::process_group::StorageUse;
use crate::session::{ModelTensors, Session, TensorKind, TensorSlice};

/// Kinds of tensors, with the start of their files' names and the suffix of their own names.
pub(super) const KINDS: [(TensorKind, &str, &str); 3] = [
    (TensorKind::Weights, MODEL_SHARD, WEIGHT_SUFFIX),
    (TensorKind::FirstMoments, OPTIMIZER_SHARD, FIRST_MOMENT_SUFFIX),
    (TensorKind::SecondMoments, OPTIMIZER_SHARD, SECOND_MOMENT_SUFFIX),
];

/// The metadata of a shard that maps the names of its tensors to slices.
pub(super) const SLICES: &str = "slices";

/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 20;

/// The shards of a checkpoint.
pub(super) struct ShardReader<'a> {
    folder: &'a Path,
    manifest: &'a Manifest,
    storage: &'a StorageUse,
    parameters: Vec<StoredParameter>,
    /// Files whose checksums have been verified, by name.
    open: HashMap<String, File>,
}

/// Place of a slice.
#[derive(Clone, Debug)]
pub(super) struct SliceLocation {
    file: String,
    offset: u64,
}

type SliceIndex = BTreeMap<ParameterId, Vec<(TensorSlice, SliceLocation)>>;

impl<'a> ShardReader<'a> {
    pub fn new(
        folder: &'a Path,
        manifest: &'a Manifest,
        model: &Model,
        storage: &'a StorageUse,
    ) -> ShardReader<'a> {
        let (parameters, open) = (stored_parameters(model), HashMap::new());
        ShardReader { folder, manifest, storage, parameters, open }
    }

    /// Sets the tensors of a session. Reads the headers of all shards, and those shards only that hold elements which the
    /// devices of this process need.
    pub fn restore(&mut self, session: &mut Session) -> Result<(), CheckpointError> {
        for (kind, start, suffix) in KINDS {
            let index = self.index(start, suffix)?;
            let folder = self.folder;
            session.load_slices(
                kind,
                &index,
                |slice, location| self.read_slice(slice, location),
                |id| {
                    CheckpointError::new(
                        folder,
                        CheckpointFault::tensor(id.to_string(), TensorFault::Incomplete),
                    )
                },
                |error| CheckpointError::new(folder, error.into()),
            )?;
        }
        Ok(())
    }

    /// Whole tensors of a kind.
    pub fn whole(&mut self, wanted: TensorKind) -> Result<ModelTensors, CheckpointError> {
        let mut tensors = ModelTensors::new();
        for (_, start, suffix) in KINDS.into_iter().filter(|(kind, ..)| *kind == wanted) {
            let index = self.index(start, suffix)?;
            for stored in self.parameters.clone() {
                let (id, elements) = (stored.parameter.id, stored.parameter.elements() as usize);
                let mut tensor = vec![0.0; elements];
                for (slice, location) in &index[&id] {
                    slice.copy_to_whole(&self.read_slice(slice, location)?, &mut tensor);
                }
                tensors.insert(id, tensor);
            }
        }
        Ok(tensors)
    }

    /// The slices of every parameter, from the headers of the shards whose names begin with `start`.
    fn index(&self, start: &str, suffix: &str) -> Result<SliceIndex, CheckpointError> {
        let parameters: HashMap<String, &StoredParameter> =
            self.parameters.iter().map(|p| (format!("{}{suffix}", p.name), p)).collect();
        let mut index = SliceIndex::new();
        for file in self.manifest.files().filter(|name| name.starts_with(start) && is_shard(name)) {
            let path = self.folder.join(file);
            let error = |fault| CheckpointError::new(&path, fault);
            for (name, slice, offset) in read_header(&path)? {
                let Some(stored) = parameters.get(&name) else { continue };
                if !slice.fits(stored.parameter.elements()) {
                    return Err(error(CheckpointFault::tensor(name, TensorFault::Incomplete)));
                }
                let location = SliceLocation { file: file.to_owned(), offset };
                index.entry(stored.parameter.id).or_default().push((slice, location));
            }
        }
        for (name, stored) in parameters {
            let slices = index.get(&stored.parameter.id).map_or(&[][..], Vec::as_slice);
            if !is_every_element_once(slices, stored.parameter.elements()) {
                let fault = CheckpointFault::tensor(name, TensorFault::Incomplete);
                return Err(CheckpointError::new(self.folder, fault));
            }
        }
        Ok(index)
    }

    fn read_slice(
        &mut self,
        slice: &TensorSlice,
        location: &SliceLocation,
    ) -> Result<Vec<f32>, CheckpointError> {
        let path = self.folder.join(&location.file);
        if !self.open.contains_key(&location.file) {
            self.manifest.verify_file(self.folder, &location.file, self.storage)?;
            let file = File::open(&path).map_err(CheckpointError::unreadable(&path))?;
            self.open.insert(location.file.clone(), file);
        }
        let mut bytes = vec![0; slice.count as usize * size_of::<f32>()];
        let mut file = &self.open[&location.file];
        file.seek(SeekFrom::Start(location.offset)).map_err(CheckpointError::unreadable(&path))?;
        for part in bytes.chunks_mut(READ_BYTES) {
            check_run(&path, self.storage)?;
            file.read_exact(part).map_err(CheckpointError::unreadable(&path))?;
        }
        let (elements, _) = bytes.as_chunks::<4>();
        Ok(elements.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

/// Whether slices, each of which fits a tensor of so many elements, have each of its elements once.
fn is_every_element_once(slices: &[(TensorSlice, SliceLocation)], elements: u64) -> bool {
    // As many elements as the tensor has, before as many ranges are collected.
    let counts = slices.iter().map(|(slice, _)| slice.count);
    let found = counts.fold(0u64, u64::saturating_add);
    if found != elements {
        return false;
    }
    let mut ranges: Vec<Range<u64>> =
        slices.iter().flat_map(|(slice, _)| slice.element_ranges()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.windows(2).all(|pair| pair[0].end <= pair[1].start)
}

/// The tensors of a shard: name, slice and offset in the file.
pub(super) fn read_header(path: &Path) -> Result<Vec<(String, TensorSlice, u64)>, CheckpointError> {
    let error = |fault| CheckpointError::new(path, fault);
    let invalid = |problem: &str| error(CheckpointFault::InvalidHeader { problem: problem.into() });
    let FileHeader { header, data_start, bytes } = FileHeader::read(path)?;
    let slices = header.metadata().as_ref().and_then(|metadata| metadata.get(SLICES));
    let slices: BTreeMap<String, TensorSlice> = slices
        .and_then(|slices| serde_json::from_str(slices).ok())
        .ok_or_else(|| invalid("the metadata `slices` is missing or invalid"))?;
    let mut tensors = vec![];
    for (name, info) in header.tensors() {
        let slice = slices.get(&name).copied();
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        match slice {
            Some(slice)
                if info.dtype == Dtype::F32
                    && start <= end
                    && slice.count.checked_mul(4) == Some(end - start)
                    && end <= bytes - data_start =>
            {
                tensors.push((name, slice, data_start + start));
            }
            _ => {
                let problem =
                    format!("tensor `{name}` is not a slice in f32 that lies in the file");
                return Err(invalid(&problem));
            }
        }
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::{Metadata, TensorInfo};

    use super::super::format::{SHARDS_VERSION, format_field};
    use super::super::manifest::FileEntry;
    use super::*;

    /// A shard of one tensor of two elements.
    fn shard() -> Vec<u8> {
        let slices = r#"{\"a\":{\"first\":0,\"run\":2,\"stride\":2,\"from\":0,\"count\":2}}"#;
        let tensor = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
        let header = format!(r#"{{"__metadata__":{{"slices":"{slices}"}},{tensor}}}"#);
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat()
    }

    /// A file with slices of tensors, whose elements are zero.
    fn write_shard(path: &Path, tensors: &[(String, TensorSlice)]) {
        let mut offset = 0;
        let info = |(name, slice): &(String, TensorSlice)| {
            let (start, shape) = (offset, vec![slice.count as usize]);
            offset += slice.count as usize * size_of::<f32>();
            (name.clone(), TensorInfo { dtype: Dtype::F32, shape, data_offsets: (start, offset) })
        };
        let infos = tensors.iter().map(info).collect();
        let slices: BTreeMap<&str, TensorSlice> =
            tensors.iter().map(|(name, slice)| (name.as_str(), *slice)).collect();
        let slices = serde_json::to_string(&slices).unwrap();
        let metadata = Metadata::new(Some(HashMap::from([(SLICES.into(), slices)])), infos);
        let header = serde_json::to_vec(&metadata.unwrap()).unwrap();
        std::fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header].concat()).unwrap();
        let file = File::options().write(true).open(path).unwrap();
        file.set_len((8 + header.len() + offset) as u64).unwrap();
    }

    /// Two shards, of which the second has one slice of one tensor: the sizes and checksums of an edited checkpoint can be right.
    #[test]
    fn slices_with_as_many_elements_as_the_tensor_may_not_overlap() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let entry = || FileEntry { bytes: 0, sha256: String::new() };
        let files = names.iter().map(|name| (name.to_string(), entry())).collect();
        let manifest = Manifest::new(&format_field(SHARDS_VERSION), files, entry());
        let model = narrows_plan::model::presets::find("cola-tiny").unwrap();
        let parameters = stored_parameters(&model);
        let whole = |stored: &StoredParameter| {
            let count = stored.parameter.elements();
            (
                stored.name.clone(),
                TensorSlice { first: 0, run: count, stride: count, from: 0, count },
            )
        };
        let (divided, size) = whole(&parameters[0]);
        let of = |from: u64, count: u64| TensorSlice { from, count, ..size };
        let columns = |first: u64| {
            let count = size.count / 2;
            TensorSlice { first, run: 1, stride: 2, from: 0, count }
        };
        let half = size.count / 2;
        for (one, other, is_complete) in [
            (of(0, half), of(half, size.count - half), true),
            (columns(0), columns(1), true),
            (of(0, half), of(half - 1, size.count - half), false),
            (columns(0), columns(0), false),
            (columns(0), of(half, size.count - half), false),
        ] {
            let mut first: Vec<_> = parameters[1..].iter().map(whole).collect();
            first.push((divided.clone(), one));
            write_shard(&folder.path().join(names[0]), &first);
            write_shard(&folder.path().join(names[1]), &[(divided.clone(), other)]);
            let storage = StorageUse::begin(None);
            let reader = ShardReader::new(folder.path(), &manifest, &model, &storage);
            let index = reader.index(MODEL_SHARD, WEIGHT_SUFFIX);
            assert_eq!(index.is_ok(), is_complete, "{one:?} {other:?}");
            if let Err(error) = index {
                let expected = format!("tensor `{divided}`: has slices that do not make up");
                assert!(error.to_string().contains(&expected), "{error}");
            }
        }
    }

    #[test]
    fn damaged_headers_never_panic() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model-00001-of-00001.safetensors");
        std::fs::write(&path, shard()).unwrap();
        assert_eq!(read_header(&path).unwrap().len(), 1);
        arbtest::arbtest(|draw| {
            let mut bytes = shard();
            for _ in 0..draw.int_in_range(1..=4)? {
                let at = draw.int_in_range(0..=bytes.len() - 1)?;
                bytes[at] = draw.arbitrary()?;
            }
            bytes.truncate(draw.int_in_range(0..=bytes.len())?);
            std::fs::write(&path, &bytes).unwrap();
            let _ = read_header(&path);
            Ok(())
        })
        .budget_ms(500);
    }
}
