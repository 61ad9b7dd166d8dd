//! A run of many processes, one a device.
//!
//! Whatever starts the processes (torchrun, srun, mpirun, a shell) says to each in its environment
//! which it is: [`LaunchInfo`]. They find each other at an address that all of them know, and go on
//! only when all are there and mean to do the same: [`TcpProcessGroup::join`]. Afterwards each is connected
//! with those of its groups, and with the first, through which all agree on the end of a step.
//!
//! Nobody waits for ever. A process that dies closes its connections; one that fails says why to all
//! it is connected with; and one that says nothing for longer than the deadline is named by those
//! who wait for it, with the last collectives that they were in. Every process then ends.
//!
//! | file | what it does |
//! |---|---|
//! | [`launch`] | what the environment says |
//! | `processes` | what they say to each other, and how they agree |
//! | `join` | how they find each other |
//! | `frame` | what goes over a connection |
//! | `peer` | a connection: what has come, and what has become of the other |
//! | `talk` | what goes one way and the other on a channel, and that both do the same |
//! | `group` | collectives and transfers between the processes of a group |
//! | `journal` | the last of them |
//! | [`error`] | why an environment describes no process of a run |

pub mod error;
mod frame;
mod group;
mod join;
mod journal;
pub mod launch;
mod peer;
mod processes;
mod talk;

pub use error::LaunchError;
pub use join::RunFact;
pub use launch::{Address, LaunchInfo, Launcher};
pub use narrows_runtime::process_group::{ClusterError, ClusterFault};
pub use processes::{ClusterTimeouts, TcpProcessGroup};
