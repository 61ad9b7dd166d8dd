//! One safetensors file: its header, and its tensors in f32.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use narrows_plan::{Defect, json};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::error::WeightsError;

/// Longest header that safetensors permits.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// An open file, whose tensors are read one by one.
pub(super) struct SafetensorsFile {
    pub path: PathBuf,
    file: File,
    pub metadata: Metadata,
    data_start: u64,
    data_bytes: u64,
}

impl SafetensorsFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// A file that cannot be read, or is no safetensors file.
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
        let metadata: Metadata =
            json::read_bytes(&header).map_err(|defect| invalid(defect.to_string()))?;
        let (data_start, data_bytes) = (8 + header_bytes, bytes - 8 - header_bytes);
        Ok(SafetensorsFile { path: path.to_path_buf(), file, metadata, data_start, data_bytes })
    }

    /// The elements of a tensor, row-major.
    ///
    /// # Errors
    /// A tensor that the file lacks, of another type than F32, F16 and BF16, or beyond the end of the file.
    pub fn read(&self, name: &str) -> Result<Vec<f32>, Defect> {
        let defect = |problem: String| Defect::new(name, problem);
        let info = self.metadata.info(name);
        let info = info.ok_or_else(|| defect("is missing".to_owned()))?;
        let element_bytes = element_bytes(info.dtype).ok_or_else(|| {
            let problem = format!("has elements of type {}", info.dtype);
            defect(problem).hint("F32, F16 or BF16")
        })?;
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let expected = elements(info).and_then(|elements| elements.checked_mul(element_bytes));
        if end > self.data_bytes || end.checked_sub(start) != expected {
            return Err(defect("does not fit the file, which is damaged".to_owned())
                .hint("copy the file again"));
        }
        let mut bytes = vec![0; (end - start) as usize];
        let mut file = &self.file;
        file.seek(SeekFrom::Start(self.data_start + start))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|error| defect(format!("cannot be read: {error}")))?;
        Ok(to_f32(&bytes, info.dtype))
    }
}

/// Number of elements of a tensor; `None` beyond 64 bits.
fn elements(info: &TensorInfo) -> Option<u64> {
    info.shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size as u64))
}

/// Bytes of an element; `None` for types that weights do not have here.
fn element_bytes(dtype: Dtype) -> Option<u64> {
    match dtype {
        Dtype::F32 => Some(4),
        Dtype::F16 | Dtype::BF16 => Some(2),
        _ => None,
    }
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
