//! Messages of the rendezvous.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::handshake::{read_message, send_confirmation, send_message};
use crate::job_token::new_nonce;

/// A property that all processes of a run must share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFact {
    /// Name, such as `plan`.
    #[serde(rename = "what")]
    pub name: String,
    /// The value, or a hash of it.
    pub value: String,
}

/// Message of a joining process to rank 0.
#[derive(Serialize, Deserialize)]
pub(super) struct JoinRequest {
    pub rank: u64,
    #[serde(rename = "world")]
    pub world_size: u64,
    /// Tells the process from another one with the same rank. All attempts of a process have the same number.
    #[serde(rename = "process")]
    pub process_id: u64,
    /// Port at which the process listens for its peers.
    pub port: u16,
    pub facts: Vec<RunFact>,
    /// Reason why the process has failed, if it has.
    #[serde(default)]
    pub failure: Option<String>,
}

/// Answer of rank 0.
#[derive(Serialize, Deserialize)]
pub(super) enum JoinReply {
    /// All processes have joined.
    #[serde(rename = "Come")]
    Accepted {
        /// Id of the run.
        #[serde(rename = "run")]
        run_id: u64,
        /// Address at which each rank listens.
        addresses: Vec<SocketAddr>,
    },
    /// The run does not start.
    #[serde(rename = "Go")]
    Rejected {
        /// The process that failed first.
        #[serde(default)]
        rank: u64,
        #[serde(rename = "why")]
        reason: String,
    },
}

/// Message to a peer other than rank 0.
#[derive(Serialize, Deserialize)]
pub(super) struct PeerHello {
    #[serde(rename = "run")]
    pub run_id: u64,
    pub rank: u64,
}

/// A number that differs from those of other runs and processes.
pub(super) fn new_id() -> u64 {
    let mut half = [0; 8];
    half.copy_from_slice(&new_nonce()[..8]);
    u64::from_le_bytes(half)
}

/// Sends a request to rank 0, and confirms the answer.
pub(super) fn ask(
    stream: &mut TcpStream,
    request: &JoinRequest,
    end: Instant,
) -> io::Result<JoinReply> {
    send_message(stream, request)?;
    let reply = read_message(stream, end)?;
    send_confirmation(stream)?;
    Ok(reply)
}
