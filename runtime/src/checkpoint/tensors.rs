//! Whole tensors in safetensors files and out of them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use safetensors::{SafeTensorError, SafeTensors};
use sha2::{Digest as _, Sha256};

use super::error::{CheckpointFault, TensorFault};
use super::manifest::FileEntry;
use super::names::StoredParameter;
use crate::session::NamedTensors;

const BUFFER_BYTES: usize = 1 << 20;

/// One kind of tensor in a file: what is behind the names of its parameters, and the tensors.
pub(super) type TensorGroup<'a> = (&'static str, &'a NamedTensors);

/// That there is every parameter, in its size, and nothing else.
pub(super) fn check(
    stored: &[StoredParameter],
    whole: &NamedTensors,
) -> Result<(), CheckpointFault> {
    check_sizes(whole, stored.iter().map(|s| (&*s.parameter.name, s.parameter.elements())))
}

/// That there are just these tensors, in these sizes.
pub(super) fn check_sizes<'a>(
    whole: &NamedTensors,
    sizes: impl Iterator<Item = (&'a str, u64)>,
) -> Result<(), CheckpointFault> {
    let sizes: BTreeMap<&str, u64> = sizes.collect();
    for (name, &expected) in &sizes {
        let Some(tensor) = whole.get(*name) else {
            return Err(CheckpointFault::tensor(*name, TensorFault::Missing));
        };
        let found = tensor.len() as u64;
        if found != expected {
            return Err(CheckpointFault::tensor(
                *name,
                TensorFault::ElementCountMismatch { expected, found },
            ));
        }
    }
    match whole.keys().find(|name| !sizes.contains_key(name.as_str())) {
        Some(name) => Err(CheckpointFault::tensor(name, TensorFault::Unknown)),
        None => Ok(()),
    }
}

/// Writes a file and makes sure that it is on the disk. The tensors must be
/// [checked](check).
pub(super) fn write(
    path: &Path,
    stored: &[StoredParameter],
    kinds: &[TensorGroup],
) -> io::Result<FileEntry> {
    let mut file = HashingWriter::create(path)?;
    let mut infos = vec![];
    let mut begin = 0;
    for (suffix, _) in kinds {
        for stored in stored {
            let end = begin + stored.parameter.elements() as usize * size_of::<f32>();
            let shape = stored.shape().into_iter().map(|size| size as usize).collect();
            let info = TensorInfo { dtype: Dtype::F32, shape, data_offsets: (begin, end) };
            infos.push((format!("{}{suffix}", stored.name), info));
            begin = end;
        }
    }
    // Without it, Hugging Face's loaders refuse the file.
    let written_for = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(written_for), infos).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write(&(header.len() as u64).to_le_bytes())?;
    file.write(&header)?;
    let mut bytes = Vec::with_capacity(BUFFER_BYTES);
    for (_, whole) in kinds {
        for stored in stored {
            let parameter = &stored.parameter;
            let ours = whole.get(&parameter.name).map_or(&[][..], Vec::as_slice);
            let theirs = if stored.transposed {
                Cow::Owned(transposed(ours, parameter.rows as usize, parameter.columns as usize))
            } else {
                Cow::Borrowed(ours)
            };
            for part in theirs.chunks(BUFFER_BYTES / size_of::<f32>()) {
                bytes.clear();
                bytes.extend(part.iter().flat_map(|number| number.to_le_bytes()));
                file.write(&bytes)?;
            }
        }
    }
    file.finish()
}

/// Reads a file that has all parameters of the given kinds and no other tensor.
pub(super) fn read<const N: usize>(
    bytes: &[u8],
    stored: &[StoredParameter],
    suffixes: [&'static str; N],
) -> Result<[NamedTensors; N], CheckpointFault> {
    let file = SafeTensors::deserialize(bytes).map_err(of_header)?;
    let wanted = |suffix: &'static str| stored.iter().map(move |s| format!("{}{suffix}", s.name));
    let known: BTreeSet<String> = suffixes.into_iter().flat_map(wanted).collect();
    let mut found = file.names();
    found.sort_unstable();
    if let Some(other) = found.into_iter().find(|name| !known.contains(*name)) {
        return Err(CheckpointFault::tensor(other, TensorFault::Unknown));
    }
    let mut kinds = [const { NamedTensors::new() }; N];
    for (kind, suffix) in kinds.iter_mut().zip(suffixes) {
        for stored in stored {
            let name = format!("{}{suffix}", stored.name);
            let tensor = read_one(&file, &name, stored)
                .map_err(|fault| CheckpointFault::Tensor { tensor: name, fault })?;
            kind.insert(stored.parameter.name.clone(), tensor);
        }
    }
    Ok(kinds)
}

fn read_one(
    file: &SafeTensors,
    name: &str,
    stored: &StoredParameter,
) -> Result<Vec<f32>, TensorFault> {
    let tensor = file.tensor(name).map_err(|_| TensorFault::Missing)?;
    if tensor.dtype() != Dtype::F32 {
        return Err(TensorFault::NotF32 { found: tensor.dtype().to_string() });
    }
    let found: Vec<u64> = tensor.shape().iter().map(|size| *size as u64).collect();
    let expected = stored.shape();
    if found != expected {
        return Err(TensorFault::ShapeMismatch { expected, found });
    }
    let (numbers, _) = tensor.data().as_chunks::<4>();
    let theirs: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let parameter = &stored.parameter;
    Ok(match stored.transposed {
        true => transposed(&theirs, parameter.columns as usize, parameter.rows as usize),
        false => theirs,
    })
}

fn of_header(error: SafeTensorError) -> CheckpointFault {
    match error {
        SafeTensorError::InvalidOffset(name) => {
            let problem = format!("tensor `{name}` does not begin where the one before it ends");
            CheckpointFault::InvalidHeader { problem }
        }
        error => CheckpointFault::InvalidHeader {
            problem: format!("is not that of a safetensors file: {error}"),
        },
    }
}

/// The transpose of a matrix, in tiles of one cache line's width.
fn transposed(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const TILE: usize = 16;
    let mut made = vec![0.0; matrix.len()];
    for first in (0..columns).step_by(TILE) {
        let last = (first + TILE).min(columns);
        for row in 0..rows {
            for column in first..last {
                made[column * rows + row] = matrix[row * columns + column];
            }
        }
    }
    made
}

/// A file that is hashed as it is written.
pub(super) struct HashingWriter {
    file: BufWriter<File>,
    hash: Sha256,
    bytes: u64,
}

impl HashingWriter {
    pub fn create(path: &Path) -> io::Result<HashingWriter> {
        let file = BufWriter::with_capacity(BUFFER_BYTES, File::create_new(path)?);
        Ok(HashingWriter { file, hash: Sha256::new(), bytes: 0 })
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Makes sure that all of it is on the disk.
    pub fn finish(self) -> io::Result<FileEntry> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok(FileEntry { bytes: self.bytes, sha256: hex::encode(self.hash.finalize()) })
    }
}
