//! Damaged copies of files, as disks, editors and attackers make them.

use arbtest::arbitrary::{Result, Unstructured};

/// Most damages of one copy.
const DAMAGES_MAX: usize = 4;
/// Longest run of bytes that is cut, repeated or moved.
const RUN_MAX: usize = 64;
/// Values that overwrite integers of any width.
const EXTREMES: [u64; 8] =
    [0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, u32::MAX as u64, 1 << 31, 1 << 62];
/// Texts that replace numbers.
const NUMBERS: [&str; 14] = [
    "0",
    "-1",
    "1",
    "0.5",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-1e-308",
    "null",
    "nan",
];
/// Pieces of text that are inserted.
const PIECES: [&str; 14] =
    ["{", "}", "[", "]", "\"", ":", ",", "\n", "\r\n", "\u{feff}", "\0", "=", "é", "\\u0000"];

/// A damaged copy of a file.
pub fn damaged(u: &mut Unstructured, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = bytes.to_vec();
    for _ in 0..u.int_in_range(1..=DAMAGES_MAX)? {
        damage(u, &mut bytes)?;
    }
    Ok(bytes)
}

fn damage(u: &mut Unstructured, bytes: &mut Vec<u8>) -> Result<()> {
    if bytes.is_empty() {
        bytes.push(u.arbitrary()?);
        return Ok(());
    }
    let at = u.choose_index(bytes.len())?;
    let end = bytes.len().min(at + u.int_in_range(1..=RUN_MAX)?);
    match u.int_in_range(0..=8)? {
        0 => bytes[at] ^= 1 << u.int_in_range(0..=7)?,
        1 => bytes.truncate(at),
        2 => drop(bytes.drain(at..end)),
        3 => {
            let run = bytes[at..end].to_vec();
            let to = u.choose_index(bytes.len())?;
            bytes.splice(to..to, run).for_each(drop);
        }
        4 => {
            let value = u.choose(&EXTREMES)?.to_le_bytes();
            let width = [1, 2, 4, 8][u.int_in_range(0..=3)?].min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&value[..width]);
        }
        5 | 6 => replace_number(at, u.choose(&NUMBERS)?, bytes),
        7 => bytes.splice(at..at, u.choose(&PIECES)?.bytes()).for_each(drop),
        _ => {
            let other = u.choose_index(bytes.len())?;
            bytes.swap(at, other);
        }
    }
    Ok(())
}

/// Replaces the first number from a place on.
fn replace_number(from: usize, number: &str, bytes: &mut Vec<u8>) {
    let digit = |byte: &u8| byte.is_ascii_digit();
    let Some(start) = bytes[from..].iter().position(digit).map(|start| from + start) else {
        return;
    };
    let digits = bytes[start..].iter().take_while(|byte| digit(byte)).count();
    bytes.splice(start..start + digits, number.bytes()).for_each(drop);
}
