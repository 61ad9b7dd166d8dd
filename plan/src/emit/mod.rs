//! Templates: the instructions of an op under a strategy, and of a value under a flow.
//!
//! The cost model prices a choice by the kernels of its templates, and lowering binds the slots of the
//! same templates to buffers. The objective of the solver and the simulated time of the program are
//! therefore sums of the same prices.

mod buckets;
mod flow;
mod op;
mod parameters;
mod reshard;
mod residual;
mod stage;
mod template;

pub use buckets::{SplitBucket, split_bucket};
pub(crate) use flow::gradient_paths;
pub use flow::{
    copy_forward, copy_recompute, flow_backward, flow_forward, flow_recompute, gradient_backward,
    is_weight_gradient_deferrable, may_defer_weight_gradient, overlapped_weight_gradient,
};
pub use op::{op_backward, op_forward, op_recompute};
pub use parameters::{
    CoalescedCollective, MultiTensorOp, ParameterOperands, accumulate_gradient_part, all_gather,
    count_square, is_gathered_in_forward, is_gradient_overwritten, is_reduced_in_backward,
    reduce_over_tensor, reduce_scatter, round_gradient, round_microbatch_gradient,
    update_parameter, widen_gradient, zero_microbatch_gradient,
};
pub(crate) use parameters::{microbatch_gradient_extent, parameter_buffers};
pub use reshard::activation_bytes;
use reshard::{gradient_fill, gradient_sum, reshard};
pub use residual::ResidualSum;
pub use stage::{
    StageBoundary, clear_square_sum, reduce_square_sum, reduce_tied_gradient, stage_transfers,
};
pub use template::{InstrTemplate, OperandSlot, TemplateOperand};
