//! Keys and values of the tokens so far.

/// Keys and values of one block, `[tokens, kv_heads·head_dim]`. Keys are rotated.
#[derive(Clone, Debug, Default)]
pub(super) struct KvCache {
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

impl KvCache {
    /// Number of tokens, with keys of this width.
    pub fn tokens(&self, width: usize) -> usize {
        self.keys.len() / width
    }
}
