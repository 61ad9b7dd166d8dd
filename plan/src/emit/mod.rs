//! Templates: the instructions of an op under a strategy, and of a value under a flow.
//!
//! Planner and runtime share them: the cost model prices a choice by the kernels of its
//! template, and lowering binds the same template's slots to buffers. That is why the objective of
//! the integer program and the simulated time of the program are the same number.

mod flow;
mod op;
mod parameters;
mod reshard;
mod stage;
mod template;

pub use flow::{
    GradientPath, copy_forward, copy_recompute, flow_backward, flow_forward, flow_recompute,
    gradient_paths,
};
pub use op::{op_backward, op_forward, op_recompute};
pub(crate) use parameters::parameter_buffers;
pub use parameters::{reduce_gradient, reduce_owned_gradient, update_parameter};
pub use reshard::{activation_bytes, gradient_fill, gradient_sum, reshard};
pub use stage::{
    StageBoundary, clear_square_sum, reduce_square_sum, reduce_tied_gradient, stage_transfers,
};
pub use template::{InstrTemplate, OperandSlot, TemplateOperand};
