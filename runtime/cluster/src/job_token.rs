//! The token of a job, by which its processes tell each other from strangers.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a [`Proof`].
pub(crate) const PROOF_BYTES: usize = 32;

/// Bytes of a [`Nonce`].
pub(crate) const NONCE_BYTES: usize = 16;

/// A number that a process chooses anew for each connection, so that no proof can be replayed.
pub(crate) type Nonce = [u8; NONCE_BYTES];

/// HMAC-SHA-256 over a role and the nonces of both sides.
pub(crate) type Proof = [u8; PROOF_BYTES];

/// Secret or id that all processes of one job know, and no other process. The token itself is never sent.
#[derive(Clone, PartialEq, Eq)]
pub struct JobToken(Vec<u8>);

/// The side of a connection that proves that it has the token. A proof of one role is none of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The process that listens.
    Responder,
    /// The process that connects.
    Initiator,
}

impl JobToken {
    /// A token from a secret, such as the contents of a file, or from the id that a launcher gives to a job. An id keeps
    /// jobs apart, but it is no secret.
    pub fn new(secret: impl Into<Vec<u8>>) -> JobToken {
        JobToken(secret.into())
    }

    /// Proves to the other side of a connection that this process has the token.
    pub(crate) fn prove(&self, role: Role, initiator: &Nonce, responder: &Nonce) -> Proof {
        self.mac(role, initiator, responder).finalize().into_bytes().into()
    }

    /// Whether the other side of a connection has the token.
    pub(crate) fn verify(
        &self,
        proof: &Proof,
        role: Role,
        initiator: &Nonce,
        responder: &Nonce,
    ) -> bool {
        self.mac(role, initiator, responder).verify(&(*proof).into()).is_ok()
    }

    fn mac(&self, role: Role, initiator: &Nonce, responder: &Nonce) -> Hmac<Sha256> {
        // The key of an HMAC may have any length, so that no key is rejected.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0)
            .unwrap_or_else(|_| Hmac::<Sha256>::new(&Default::default()));
        mac.update(match role {
            Role::Responder => b"narrows host",
            Role::Initiator => b"narrows visitor",
        });
        mac.update(initiator);
        mac.update(responder);
        mac
    }
}

impl fmt::Debug for JobToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobToken(…)")
    }
}

/// A number that no other connection uses, from the random keys of the standard library's hash maps.
pub(crate) fn new_nonce() -> Nonce {
    let mut nonce = Nonce::default();
    for half in nonce.chunks_mut(8) {
        half.copy_from_slice(&RandomState::new().hash_one(std::process::id()).to_le_bytes());
    }
    nonce
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_one_token_one_role_and_one_connection() {
        let token = JobToken::new("job 17");
        let (initiator, responder) = (new_nonce(), new_nonce());
        let proof = token.prove(Role::Responder, &initiator, &responder);
        assert!(token.verify(&proof, Role::Responder, &initiator, &responder));
        let other = JobToken::new("job 18");
        for refused in [
            other.verify(&proof, Role::Responder, &initiator, &responder),
            token.verify(&proof, Role::Initiator, &initiator, &responder),
            token.verify(&proof, Role::Responder, &responder, &initiator),
            token.verify(&proof, Role::Responder, &initiator, &new_nonce()),
        ] {
            assert!(!refused);
        }
        assert!(!format!("{token:?}").contains("17"));
    }
}
