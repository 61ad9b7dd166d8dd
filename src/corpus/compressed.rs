//! Files that may be compressed: what they are is read from their first bytes.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use indicatif::ProgressBar;

/// First bytes of gzip.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// First bytes of zstd.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Largest window of zstd, that of `--long=31`: 2 GiB. By default the library refuses more than `--long=27`.
const WINDOW_LOG_MAX: u32 = if cfg!(target_pointer_width = "64") { 31 } else { 30 };

/// Bytes per read.
const BUFFER_BYTES: usize = 64 << 10;

/// A reader that advances a progress bar by the bytes read.
struct CountingReader<R> {
    reader: R,
    progress: ProgressBar,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.progress.inc(read as u64);
        Ok(read)
    }
}

/// The contents of a file, without its compression. The progress bar counts the bytes of the file.
///
/// # Errors
/// A file that cannot be read.
pub fn decompressed(
    file: Box<dyn Read>,
    progress: ProgressBar,
) -> io::Result<BufReader<Box<dyn Read>>> {
    let counting = CountingReader { reader: file, progress };
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, counting);
    let start = reader.fill_buf()?;
    let contents: Box<dyn Read> = if start.starts_with(&GZIP) {
        Box::new(MultiGzDecoder::new(reader))
    } else if start.starts_with(&ZSTD) {
        let mut decoder = zstd::Decoder::with_buffer(reader)?;
        decoder.window_log_max(WINDOW_LOG_MAX)?;
        Box::new(decoder)
    } else {
        Box::new(reader)
    };
    Ok(BufReader::with_capacity(BUFFER_BYTES, contents))
}
