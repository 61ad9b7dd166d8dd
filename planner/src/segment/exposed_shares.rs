//! Prices of collectives in pairs of microbatches other than their bounds.

/// Shares of the time of collectives in pairs of microbatches that count as exposed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ExposedShares {
    /// Share of an all-reduce.
    pub all_reduce: f64,
    /// Share of a reduce-scatter, an all-gather, or an all-to-all. Where these divide an all-reduce into two, there is little
    /// computation between them, so that more of them is exposed.
    pub others: f64,
}

impl ExposedShares {
    /// No share, as in lower bounds.
    pub(crate) const NONE: ExposedShares = ExposedShares { all_reduce: 0.0, others: 0.0 };

    /// The shares that searches try, in this order.
    pub(crate) const TRIED: [ExposedShares; 4] = [
        ExposedShares { all_reduce: 0.5, others: 0.5 },
        ExposedShares { all_reduce: 0.25, others: 0.25 },
        ExposedShares { all_reduce: 0.1, others: 0.1 },
        ExposedShares { all_reduce: 0.0, others: 0.5 },
    ];
}
