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

    /// The attentions to search on a mesh: of those that divide its heads and positions, the exchange of heads; the
    /// gather of keys where heads cannot be exchanged, or where it moves fewer bytes; and ring attention where transfers
    /// overlap with computation. One without a context axis.
    pub(crate) fn context_attentions(&self, mesh: &Mesh) -> Vec<ContextAttention> {
        use ContextAttention::{Exchange, Gather, Ring};
        let is_legal = |attention: &ContextAttention| self.allows_attention(mesh, *attention);
        let is_candidate =
            |attention: &ContextAttention| match (self.fixed_context_attention(), attention) {
                _ if mesh.context == 1 => *attention == Exchange,
                (Some(fixed), _) => *attention == fixed,
                (None, Exchange) => true,
                // All positions of keys and values, or a device's positions of queries, keys, values and outputs.
                (None, Gather) => {
                    let Model { heads, kv_heads, .. } = self.model;
                    !is_legal(&Exchange) || mesh.context * kv_heads < heads + kv_heads
                }
                (None, Ring) => self.profile.file().overlap.is_some(),
            };
        let candidates = ContextAttention::ALL.into_iter();
        candidates.filter(|attention| is_candidate(attention) && is_legal(attention)).collect()
    }

    /// Whether a mesh divides the heads and positions of an attention, and the model and the grouping allow it.
    fn allows_attention(&self, mesh: &Mesh, attention: ContextAttention) -> bool {
        attention.divides_heads(mesh, &self.model)
            && attention.divides_positions(mesh, self.sequence_length)
            && self.defect_of_attention(attention).is_none()
    }

    /// The reason why no context axis can have an attention, and a change to try.
    fn defect_of_attention(&self, attention: ContextAttention) -> Option<(String, &'static str)> {
        match attention {
            ContextAttention::Exchange => None,
            ContextAttention::Gather => (!self.may_separate_queries()).then(|| {
                let problem =
                    "queries are one tensor with keys and values, which are gathered alone";
                (problem.to_owned(), "another --grouping than `on`")
            }),
            ContextAttention::Ring => {
                let window = self.model.least_window(self.sequence_length)?;
                let problem = format!(
                    "ring attention passes all keys around, but a sliding window of {window} keys hides some of them"
                );
                Some((problem, "--context-attention gather"))
            }
        }
    }

    /// Whether some grouping leaves queries a tensor without keys and values.
    fn may_separate_queries(&self) -> bool {
        let of_all = Grouping { qkv: true, gate_up: true };
        let is_separate =
            |shape: &BlockShape| has_separate_queries(&block_segment(&self.model, shape, of_all));
        self.grouping != GroupingRule::On || BlockShape::all(&self.model).iter().all(is_separate)
    }

    /// A fixed attention that no context axis can have, or a fixed context axis that divides no sequence, or not the heads
    /// of attention on any tensor axis.
    pub(crate) fn defect_of_context_axis(&self) -> Option<RequestDefect> {
        let Some(context) = self.context else {
            let (problem, hint) = self.defect_of_attention(self.context_attention?)?;
            let (field, hint) = (RequestField::ContextAttention, Some(hint.to_owned()));
            return Some(RequestDefect { field, problem, hint });
        };
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
        } else if let Some(ContextAttention::Ring) = fixed
            && let Some(defect) = self.defect_of_attention(ContextAttention::Ring)
        {
            defect
        } else if !matches!(fixed, Some(ContextAttention::Exchange | ContextAttention::Ring))
            && let Some((problem, hint)) = self.defect_of_attention(ContextAttention::Gather)
        {
            let hint = match self.allows_attention(&mesh, ContextAttention::Ring) {
                true => "another --grouping than `on`, or --context-attention ring",
                false => hint,
            };
            (problem, hint)
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
                (_, Some(ContextAttention::Gather | ContextAttention::Ring)) => {
                    "a smaller tensor axis"
                }
                _ => "a smaller context or tensor axis",
            };
            (problem, hint)
        };
        let (field, hint) = (RequestField::Context, Some(hint.to_owned()));
        Some(RequestDefect { field, problem, hint })
    }
}
