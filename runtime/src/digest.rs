//! SHA-256 digests of files and configurations.

use sha2::{Digest as _, Sha256};

/// A SHA-256 digest. `hex::encode` writes it as 64 hexadecimal digits.
pub type Sha256Digest = [u8; 32];

/// The SHA-256 digest of some bytes.
pub fn sha256(bytes: &[u8]) -> Sha256Digest {
    Sha256::digest(bytes).into()
}
