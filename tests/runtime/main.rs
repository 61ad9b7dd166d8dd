//! Planned programs on processors: every plan is one function of the tokens.

mod curves;
mod exact;
mod subject;
mod traffic;
mod twins;
