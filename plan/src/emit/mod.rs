//! Templates: the instructions that an op under a strategy, or a value under a choice, turns into.
//!
//! Both sides of the project use them: the cost model prices a choice by the kernels of its
//! template, and lowering binds the same template's slots to buffers. That is why the objective of
//! the integer program and the simulated time of the program are the same number.

mod flow;
mod op;
mod parameters;
mod reshard;
mod stage;
mod template;

pub use flow::{
    GradientPath, copy_forward, copy_redo, flow_backward, flow_forward, flow_redo, gradient_paths,
};
pub use op::{op_backward, op_forward, op_redo};
pub(crate) use parameters::parameter_extents;
pub use parameters::{
    OpParameters, ParameterRole, WeightSplit, op_parameters, owned_reduce, parameter_reduce,
    parameter_update,
};
pub use reshard::{copy_bytes, gradient_fill, gradient_sum, reshard};
pub use stage::{StageBoundary, gradient_extent, hops, step_begin, step_norm, tied_reduce};
pub use template::{InstrTemplate, OperandSlot, TemplateOperand};
