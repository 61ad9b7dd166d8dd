//! Reading and writing whole tensors in safetensors files.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use narrows_plan::model::ParameterId;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use safetensors::{SafeTensorError, SafeTensors};
use sha2::{Digest as _, Sha256};

use super::error::{CheckpointError, CheckpointFault, TensorFault};
use super::manifest::FileEntry;
use super::names::StoredParameter;
use crate::session::ModelTensors;

const BUFFER_BYTES: usize = 1 << 20;

/// Larger than any header of a checkpoint's file.
const HEADER_BYTES_MAX: u64 = 256 << 20;

/// Tensors of one kind in a file: the suffix of their names, and the tensors.
pub(super) type TensorGroup<'a> = (&'static str, &'a ModelTensors);

/// Checks that there is a tensor of the right size for every parameter, and no other tensor.
pub(super) fn check(
    parameters: &[StoredParameter],
    whole: &ModelTensors,
) -> Result<(), CheckpointFault> {
    check_sizes(whole, parameters.iter().map(|p| (p.parameter.id, p.parameter.elements())))
}

/// Checks that there are exactly these tensors, of these sizes.
pub(super) fn check_sizes(
    whole: &ModelTensors,
    sizes: impl Iterator<Item = (ParameterId, u64)>,
) -> Result<(), CheckpointFault> {
    let sizes: BTreeMap<ParameterId, u64> = sizes.collect();
    for (id, &expected) in &sizes {
        let Some(tensor) = whole.get(id) else {
            return Err(CheckpointFault::tensor(id.to_string(), TensorFault::Missing));
        };
        let actual = tensor.len() as u64;
        if actual != expected {
            let fault = TensorFault::ElementCountMismatch { expected, actual };
            return Err(CheckpointFault::tensor(id.to_string(), fault));
        }
    }
    match whole.keys().find(|id| !sizes.contains_key(*id)) {
        Some(id) => Err(CheckpointFault::tensor(id.to_string(), TensorFault::Unknown)),
        None => Ok(()),
    }
}

/// Writes a file and flushes it to the disk. The tensors must be [checked](check).
pub(super) fn write(
    path: &Path,
    parameters: &[StoredParameter],
    groups: &[TensorGroup],
) -> io::Result<FileEntry> {
    let mut file = HashingWriter::create(path)?;
    let mut infos = vec![];
    let mut start = 0;
    for (suffix, _) in groups {
        for stored in parameters {
            let end = start + stored.parameter.elements() as usize * size_of::<f32>();
            let shape = stored.shape().into_iter().map(|size| size as usize).collect();
            let info = TensorInfo { dtype: Dtype::F32, shape, data_offsets: (start, end) };
            infos.push((format!("{}{suffix}", stored.name), info));
            start = end;
        }
    }
    // Hugging Face's loaders require it.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(format), infos).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write(&(header.len() as u64).to_le_bytes())?;
    file.write(&header)?;
    for (_, whole) in groups {
        for stored in parameters {
            let parameter = &stored.parameter;
            let elements = whole.get(&parameter.id).map_or(&[][..], Vec::as_slice);
            let elements = if stored.transposed {
                Cow::Owned(transpose(elements, parameter.rows as usize, parameter.columns as usize))
            } else {
                Cow::Borrowed(elements)
            };
            file.write_elements(&elements)?;
        }
    }
    file.finish()
}

/// Reads a file that has a tensor of every parameter with every suffix, and no other tensor.
pub(super) fn read<const N: usize>(
    bytes: &[u8],
    parameters: &[StoredParameter],
    suffixes: [&'static str; N],
) -> Result<[ModelTensors; N], CheckpointFault> {
    let file = SafeTensors::deserialize(bytes).map_err(header_fault)?;
    let names_with =
        |suffix: &'static str| parameters.iter().map(move |p| format!("{}{suffix}", p.name));
    let known: BTreeSet<String> = suffixes.into_iter().flat_map(names_with).collect();
    let mut names = file.names();
    names.sort_unstable();
    if let Some(other) = names.into_iter().find(|name| !known.contains(*name)) {
        return Err(CheckpointFault::tensor(other, TensorFault::Unknown));
    }
    let mut groups = [const { ModelTensors::new() }; N];
    for (group, suffix) in groups.iter_mut().zip(suffixes) {
        for stored in parameters {
            let name = format!("{}{suffix}", stored.name);
            let tensor = read_tensor(&file, &name, stored)
                .map_err(|fault| CheckpointFault::Tensor { tensor: name, fault })?;
            group.insert(stored.parameter.id, tensor);
        }
    }
    Ok(groups)
}

/// Header of a safetensors file, which is read without the tensors.
pub(super) struct FileHeader {
    /// Names, shapes and places of the tensors.
    pub header: Metadata,
    /// First byte after the header.
    pub data_start: u64,
    /// Bytes of the file.
    pub bytes: u64,
}

impl FileHeader {
    /// Reads the header of a file.
    pub fn read(path: &Path) -> Result<FileHeader, CheckpointError> {
        let invalid = |problem: &str| {
            let fault = CheckpointFault::InvalidHeader { problem: problem.into() };
            CheckpointError::new(path, fault)
        };
        let mut file = File::open(path).map_err(CheckpointError::unreadable(path))?;
        let bytes = file.metadata().map_err(CheckpointError::unreadable(path))?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|_| invalid("the file is shorter than a header"))?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_BYTES_MAX.min(bytes - 8) {
            return Err(invalid("the header is longer than the file, or than any header"));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(CheckpointError::unreadable(path))?;
        let header = serde_json::from_slice(&header)
            .map_err(|error| invalid(&format!("is not a safetensors header: {error}")))?;
        Ok(FileHeader { header, data_start: 8 + length, bytes })
    }
}

/// Checks that a file has a valid header and the bytes of its tensors, and no other bytes.
pub(super) fn check_header(path: &Path) -> Result<(), CheckpointError> {
    let FileHeader { header, data_start, bytes } = FileHeader::read(path)?;
    let tensors = header.tensors();
    let data_bytes = tensors.values().map(|info| info.data_offsets.1 as u64).max().unwrap_or(0);
    if data_start.checked_add(data_bytes) == Some(bytes) {
        return Ok(());
    }
    let problem = format!(
        "states {data_bytes} bytes of tensors, and the file has {} after it",
        bytes - data_start
    );
    Err(CheckpointError::new(path, CheckpointFault::InvalidHeader { problem }))
}

fn read_tensor(
    file: &SafeTensors,
    name: &str,
    stored: &StoredParameter,
) -> Result<Vec<f32>, TensorFault> {
    let tensor = file.tensor(name).map_err(|_| TensorFault::Missing)?;
    if tensor.dtype() != Dtype::F32 {
        return Err(TensorFault::NotF32 { actual: tensor.dtype().to_string() });
    }
    let actual: Vec<u64> = tensor.shape().iter().map(|size| *size as u64).collect();
    let expected = stored.shape();
    if actual != expected {
        return Err(TensorFault::ShapeMismatch { expected, actual });
    }
    let (elements, _) = tensor.data().as_chunks::<4>();
    let elements: Vec<f32> = elements.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let parameter = &stored.parameter;
    Ok(match stored.transposed {
        true => transpose(&elements, parameter.columns as usize, parameter.rows as usize),
        false => elements,
    })
}

fn header_fault(error: SafeTensorError) -> CheckpointFault {
    match error {
        SafeTensorError::InvalidOffset(name) => {
            let problem = format!("tensor `{name}` does not start where the previous one ends");
            CheckpointFault::InvalidHeader { problem }
        }
        error => CheckpointFault::InvalidHeader {
            problem: format!("is not a safetensors header: {error}"),
        },
    }
}

/// The transpose of a matrix, computed in tiles of a cache line.
pub(crate) fn transpose(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const TILE: usize = 16;
    let mut result = vec![0.0; matrix.len()];
    for first in (0..columns).step_by(TILE) {
        let last = (first + TILE).min(columns);
        for row in 0..rows {
            for column in first..last {
                result[column * rows + row] = matrix[row * columns + column];
            }
        }
    }
    result
}

/// Writes a file and computes its checksum.
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

    pub fn write_elements(&mut self, elements: &[f32]) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES.min(size_of_val(elements))];
        for chunk in elements.chunks(BUFFER_BYTES / size_of::<f32>()) {
            let bytes = &mut buffer[..size_of_val(chunk)];
            for (bytes, element) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(chunk) {
                *bytes = element.to_le_bytes();
            }
            self.write(bytes)?;
        }
        Ok(())
    }

    /// Flushes the file to the disk.
    pub fn finish(self) -> io::Result<FileEntry> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok(FileEntry { bytes: self.bytes, sha256: hex::encode(self.hash.finalize()) })
    }
}
