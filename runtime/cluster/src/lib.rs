//! A run of many processes, one device each, over TCP.
//!
//! A launcher (torchrun, srun, mpirun, a shell) tells each process its rank in environment
//! variables: [`LaunchInfo`]. The processes find each other at a rendezvous address and start only
//! when all have joined and were started for the same run: [`TcpProcessGroup::join`]. Each process is
//! then connected with the members of its device groups, and with rank 0, through which all agree on
//! the result of every step.
//!
//! Every wait has a timeout. A process that dies closes its connections; one that fails sends its
//! error to all connected processes; and a process that sends nothing for longer than the timeout is
//! named by those that wait for it, with their last collectives. Every process then ends.
//!
//! | file | contents |
//! |---|---|
//! | `launch` | rank, world size and rendezvous address from the environment |
//! | `launcher` | launchers, and the variables that each sets |
//! | `siblings` | whether other processes of the job run on this machine |
//! | `slurm` | Slurm's lists of hosts and of tasks |
//! | `job_token`, `handshake` | how processes prove that they belong to one job |
//! | `rendezvous` | how processes find each other and check that they belong to one run |
//! | `process_group` | all processes: control exchanges, gathering, abort, shutdown |
//! | `communicator` | collectives of a device group, transfers between two processes |
//! | `channel` | one sequence of operations with its peers, checked to be the same on both sides |
//! | `operation` | operations of several processes, as named in frames and messages |
//! | `peer` | a connection: received frames, and why it ended |
//! | `activity`, `wait` | what a process answers to one that waits for it, and how long that one waits |
//! | `frame` | the wire format |
//! | `flight_recorder` | the last operations of this process |

mod activity;
mod channel;
mod communicator;
mod flight_recorder;
mod frame;
mod handshake;
mod job_token;
mod launch;
mod launcher;
mod operation;
mod peer;
mod process_group;
mod rendezvous;
mod siblings;
mod slurm;
mod wait;

pub use job_token::JobToken;
pub use launch::{Address, LaunchError, LaunchInfo};
pub use launcher::Launcher;
pub use narrows_runtime::process_group::{ClusterError, ClusterFault};
pub use process_group::{ClusterTimeouts, TcpProcessGroup};
pub use rendezvous::RunFact;
