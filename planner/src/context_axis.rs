//! The context axis of a request: the sizes and the attentions that a search tries.

use narrows_plan::graph::{BlockShape, Grouping, block_segment};
use narrows_plan::model::Model;
use narrows_plan::strategy::has_separate_queries;
use narrows_plan::{ContextAttention, Mesh};

use crate::request::{GroupingRule, Request, RequestDefect, RequestField};

/// Least length of the sequences that are searched with a context axis of any size. Shorter ones leave attention and
/// the GEMMs of a part too small for the collectives to pay, unless the batch has fewer sequences than replicas.
const CONTEXT_LENGTH_MIN: u64 = 8192;

impl Request {
    /// The size of the context axis where it is not searched.
    pub(crate) fn fixed_context(&self) -> Option<u64> {
        self.context.or(self.has_short_sequences().then_some(1))
    }

    fn has_short_sequences(&self) -> bool {
        self.sequence_length < CONTEXT_LENGTH_MIN
    }

    /// The collectives around attention on a context axis where they are not searched.
    fn fixed_context_attention(&self) -> Option<ContextAttention> {
        let of_short = self.has_short_sequences().then_some(ContextAttention::Exchange);
        self.context_attention.or(of_short)
    }

    /// The attentions to search on a mesh: of those that divide its heads and positions, the exchange of heads, and the
    /// gather of keys where heads cannot be exchanged, or where it moves fewer bytes. One without a context axis.
    pub(crate) fn context_attentions(&self, mesh: &Mesh) -> Vec<ContextAttention> {
        use ContextAttention::Exchange;
        let is_legal = |attention: &ContextAttention| {
            attention.divides_heads(mesh, &self.model)
                && attention.divides_positions(mesh, self.sequence_length)
                && (*attention == Exchange || self.may_separate_queries())
        };
        let candidates = match self.fixed_context_attention() {
            _ if mesh.context == 1 => vec![Exchange],
            Some(fixed) => vec![fixed],
            // All positions of keys and values, or a device's positions of queries, keys, values and outputs.
            None if is_legal(&Exchange)
                && mesh.context * self.model.kv_heads >= self.model.heads + self.model.kv_heads =>
            {
                vec![Exchange]
            }
            None => ContextAttention::ALL.to_vec(),
        };
        candidates.into_iter().filter(is_legal).collect()
    }

    /// Whether some grouping leaves queries a tensor without keys and values.
    fn may_separate_queries(&self) -> bool {
        let of_all = Grouping { qkv: true, gate_up: true };
        let is_separate =
            |shape: &BlockShape| has_separate_queries(&block_segment(&self.model, shape, of_all));
        self.grouping != GroupingRule::On || BlockShape::all(&self.model).iter().all(is_separate)
    }

    /// A fixed context axis that divides no sequence, or not the heads of attention on any tensor axis.
    pub(crate) fn defect_of_context_axis(&self) -> Option<RequestDefect> {
        let context = self.context?;
        let tensor = self.tensor.unwrap_or(1);
        let mesh = Mesh { tensor, pipeline: 1, data: 1, context };
        let Model { heads, kv_heads, .. } = self.model;
        let fixed = self.fixed_context_attention();
        let (problem, hint) = if !self.sequence_length.is_multiple_of(context) {
            let problem = format!(
                "{context} devices do not divide {} positions evenly",
                self.sequence_length
            );
            (problem, "a divisor of the sequence length")
        } else if !self.context_attentions(&mesh).is_empty() {
            return None;
        } else if fixed != Some(ContextAttention::Exchange) && !self.may_separate_queries() {
            let problem = "queries are one tensor with keys and values, which are gathered alone";
            (problem.into(), "another --grouping than `on`")
        } else if fixed != Some(ContextAttention::Exchange)
            && ContextAttention::Gather.divides_heads(&mesh, &self.model)
        {
            let problem = format!(
                "{context} devices do not divide {} positions into two equal chunks each",
                self.sequence_length
            );
            (problem, "half a divisor of the sequence length")
        } else {
            let devices = match (fixed, self.tensor) {
                (Some(ContextAttention::Exchange), Some(tensor)) => {
                    format!("tensor × context = {} devices", tensor * context)
                }
                (Some(ContextAttention::Exchange), None) => format!("{context} devices"),
                _ => format!("tensor = {tensor} devices"),
            };
            let problem = format!(
                "{devices} do not divide {heads} query heads and {kv_heads} KV heads evenly"
            );
            let hint = match (self.context_attention, fixed) {
                (None, Some(ContextAttention::Exchange)) => {
                    "a smaller context or tensor axis, or --context-attention gather"
                }
                (_, Some(ContextAttention::Gather)) => "a smaller tensor axis",
                _ => "a smaller context or tensor axis",
            };
            (problem, hint)
        };
        let (field, hint) = (RequestField::Context, Some(hint.to_owned()));
        Some(RequestDefect { field, problem, hint })
    }
}
