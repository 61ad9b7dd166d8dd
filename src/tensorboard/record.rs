//! Records of a TFRecord file: length, checksum of the length, data, checksum of the data.
//!
//! Integers are little-endian: a length of 64 bits, and checksums of 32. A checksum is the CRC-32C (Castagnoli) of the
//! bytes, rotated right by 15 bits, plus a constant: the mask keeps the checksum of data that contain checksums from degenerating.

use std::io::{self, Read};

/// The polynomial of CRC-32C, with its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// Added to a rotated checksum.
const MASK_DELTA: u32 = 0xa282_ead8;

/// The record of some data.
pub(super) fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let checksum = |bytes| masked_crc32c(bytes).to_le_bytes();
    [&length[..], &checksum(&length), data, &checksum(data)].concat()
}

/// The data of the next record; `None` at the end of a file, whose last record may be cut off.
///
/// # Errors
/// A file that cannot be read; `InvalidData` for bytes that are no record.
pub(super) fn read(file: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = |count: u64| -> io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![];
        file.by_ref().take(count).read_to_end(&mut bytes)?;
        Ok((bytes.len() as u64 == count).then_some(bytes))
    };
    let Some(start) = bytes(12)? else { return Ok(None) };
    let (length, checksum) = start.split_at(8);
    let is_record = |data: &[u8], checksum: &[u8]| masked_crc32c(data).to_le_bytes() == checksum;
    let length_bytes: [u8; 8] = length.try_into().unwrap_or_default();
    if !is_record(length, checksum) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let (Some(data), Some(checksum)) = (bytes(u64::from_le_bytes(length_bytes))?, bytes(4)?) else {
        return Ok(None);
    };
    match is_record(&data, &checksum) {
        true => Ok(Some(data)),
        false => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(MASK_DELTA)
}

fn crc32c(bytes: &[u8]) -> u32 {
    let shift = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
    !bytes
        .iter()
        .fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| shift(crc)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 3720, appendix B.4.
    #[test]
    fn checksums_are_those_of_the_standard() {
        let ascending: Vec<u8> = (0..32).collect();
        for (bytes, expected) in [
            (&[0; 32][..], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (b"123456789", 0xe306_9283),
        ] {
            assert_eq!(crc32c(bytes), expected, "{bytes:?}");
        }
    }
}
