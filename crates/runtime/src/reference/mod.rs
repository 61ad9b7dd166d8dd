//! Where the reference interpreter will be. There is none yet, and nothing here runs.
//!
//! It will execute the unsharded [`Model`](narrows_plan::model::Model), not a program: op by op as
//! [`graph`](narrows_plan::graph) builds them, in f32, on one device, with no mesh, no layouts, no
//! recomputation and no arena, and every gradient derived by hand next to its op. It shares no code
//! with `emit`, `lower` or a backend, because it is the oracle for all of them: the loss, every
//! gradient and ten steps of AdamW must come out equal, within rounding, for every plan of the
//! search space on every backend.
//!
//! It is absent because there is nothing yet that it could be held against: the only backend,
//! [`null`](crate::null), computes no numbers. What stands in for it is
//! [`check`](narrows_plan::check), which proves of a program that layouts, sums and gradients fit
//! each other. That says nothing about the numbers a kernel makes.
