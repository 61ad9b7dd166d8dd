//! One safetensors file: its header, and its tensors in f32.
//!
//! The data of the tensors cover the file without gaps and without overlaps, and no name is repeated. A file that breaks
//! these rules of the format is refused, because other readers may find other tensors in it.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use narrows_plan::counts::plural;
use narrows_plan::{Defect, json};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error::WeightsError;

/// Longest header that safetensors permits.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Name of the entry of a header that is no tensor.
const METADATA: &str = "__metadata__";
/// Hint for a file whose header contradicts its data.
const INTACT_FILE: &str = "copy or write the file again";

/// The entries of a header: tensors by their names, and the metadata under [`METADATA`].
#[derive(Deserialize)]
struct Header(#[serde(deserialize_with = "json::without_repeated_keys")] BTreeMap<String, Value>);

/// An open file, whose tensors are read one by one.
pub(super) struct SafetensorsFile {
    pub path: PathBuf,
    file: File,
    pub metadata: Metadata,
    data_start: u64,
}

impl SafetensorsFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// A file that cannot be read, or is no safetensors file; a name that is repeated; and a tensor whose data overlap others,
    /// leave a gap, or do not end with the file.
    pub fn open(path: &Path) -> Result<SafetensorsFile, WeightsError> {
        let invalid = |problem: String| {
            let hint =
                "a safetensors file; `save_pretrained(…, safe_serialization=True)` writes one";
            WeightsError::of_file(path, format!("is not a safetensors file: {problem}"), hint)
        };
        let mut file = File::open(path).map_err(WeightsError::io(path, "opened"))?;
        let bytes = file.metadata().map_err(WeightsError::io(path, "read"))?.len();
        if bytes < 8 {
            return Err(invalid(format!("has {bytes} bytes")));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(WeightsError::io(path, "read"))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > HEADER_BYTES_MAX.min(bytes - 8) {
            return Err(invalid(format!("its header would have {header_bytes} bytes")));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(WeightsError::io(path, "read"))?;
        let in_header = |defect: Defect| invalid(defect.to_string());
        let Header(mut entries) = json::read_bytes(&header).map_err(in_header)?;
        let metadata = entries.remove(METADATA).unwrap_or_default();
        let metadata: Option<HashMap<String, String>> =
            entry(METADATA, &metadata).map_err(in_header)?;
        let tensors = entries.iter().map(|(name, value)| Ok((name.clone(), entry(name, value)?)));
        let tensors: Result<Vec<(String, TensorInfo)>, Defect> = tensors.collect();
        let mut tensors = tensors.map_err(in_header)?;
        tensors
            .sort_by(|(a, left), (b, right)| (left.data_offsets, a).cmp(&(right.data_offsets, b)));
        check_places(&tensors, bytes - 8 - header_bytes)
            .map_err(|defect| WeightsError::new(path, defect))?;
        let metadata =
            Metadata::new(metadata, tensors).map_err(|error| invalid(error.to_string()))?;
        let data_start = 8 + header_bytes;
        Ok(SafetensorsFile { path: path.to_path_buf(), file, metadata, data_start })
    }

    /// The elements of a tensor, row-major.
    ///
    /// # Errors
    /// A tensor that the file lacks, of another type than F32, F16 and BF16, or that cannot be read.
    pub fn read(&self, name: &str) -> Result<Vec<f32>, Defect> {
        let defect = |problem: String| Defect::new(name, problem);
        let info = self.metadata.info(name);
        let info = info.ok_or_else(|| defect("is missing".to_owned()))?;
        if !matches!(info.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            let problem = format!("has elements of type {}", info.dtype);
            return Err(defect(problem).hint("F32, F16 or BF16"));
        }
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let mut bytes = vec![0; (end - start) as usize];
        let mut file = &self.file;
        file.seek(SeekFrom::Start(self.data_start + start))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|error| defect(format!("cannot be read: {error}")))?;
        Ok(to_f32(&bytes, info.dtype))
    }
}

/// The value of an entry of a header.
fn entry<T: DeserializeOwned>(name: &str, value: &Value) -> Result<T, Defect> {
    json::read(&value.to_string()).map_err(|defect| {
        let Defect { field, problem, .. } = defect;
        let field = if field.is_empty() { name.to_owned() } else { format!("{name}: {field}") };
        Defect::new(field, json::without_position(&problem))
    })
}

/// Checks that the data of tensors, in the order of their offsets, are as large as their shapes say and cover all data of
/// a file.
fn check_places(tensors: &[(String, TensorInfo)], data_bytes: u64) -> Result<(), Defect> {
    let mut covered = 0;
    for (name, info) in tensors {
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let problem = if start < covered {
            format!("begins at byte {start} of the data, within the tensor that ends at {covered}")
        } else if start > covered {
            format!(
                "begins at byte {start} of the data, and the tensor before it ends at {covered}"
            )
        } else if end.checked_sub(start) != bytes_of(info) {
            format!("has the offsets {:?}, and another size by its shape", info.data_offsets)
        } else if end > data_bytes {
            format!("ends at byte {end} of the data, and the file has {data_bytes}")
        } else {
            covered = end;
            continue;
        };
        return Err(Defect::new(name, problem).hint(INTACT_FILE));
    }
    match tensors.last() {
        Some((last, _)) if covered < data_bytes => {
            let rest = plural(data_bytes - covered, "byte");
            let problem = format!("is the last tensor, and the file has {rest} after it");
            Err(Defect::new(last, problem).hint(INTACT_FILE))
        }
        None if data_bytes > 0 => {
            let problem = format!("has {} of data and no tensor", plural(data_bytes, "byte"));
            Err(Defect::new("", problem).hint(INTACT_FILE))
        }
        _ => Ok(()),
    }
}

/// Bytes of a tensor by its shape and type; `None` beyond 64 bits.
fn bytes_of(info: &TensorInfo) -> Option<u64> {
    let bits = info.dtype.bitsize() as u64;
    let elements = info.shape.iter().try_fold(1_u64, |n, size| n.checked_mul(*size as u64))?;
    elements.checked_mul(bits).map(|bits| bits.div_ceil(8))
}

fn to_f32(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let halves = |convert: fn(u16) -> f32| {
        let (halves, _) = bytes.as_chunks::<2>();
        halves.iter().map(|half| convert(u16::from_le_bytes(*half))).collect()
    };
    match dtype {
        Dtype::BF16 => halves(|bits| half::bf16::from_bits(bits).to_f32()),
        Dtype::F16 => halves(|bits| half::f16::from_bits(bits).to_f32()),
        _ => {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|word| f32::from_le_bytes(*word)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_two_bytes_are_converted_exactly() {
        assert_eq!(to_f32(&[0x80, 0x3f, 0x20, 0xc0], Dtype::BF16), [1.0, -2.5]);
        assert_eq!(to_f32(&[0x00, 0x3c, 0x01, 0x00], Dtype::F16), [1.0, 2_f32.powi(-24)]);
    }
}
