//! The cache that searches share: results, and the tables and solutions of segments.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::lock::lock;
use crate::search_key::SearchKey;
use crate::search_result::SearchResult;
use crate::segment::SegmentCache;

/// Results of searches, and tables and solutions of segments, for several searches. Searches on any threads may share
/// one cache: plans, times and proofs are the same as without a cache. Clones share their contents.
#[derive(Clone, Default)]
pub struct SearchCache {
    segments: SegmentCache,
    results: Arc<Mutex<HashMap<SearchKey, Arc<SearchResult>>>>,
}

/// Results from which on they are forgotten. Each has the program of its plan, of about a megabyte.
const RESULTS_MAX: usize = 64;

impl SearchCache {
    /// Tables and solutions of segments.
    pub(crate) fn segments(&self) -> &SegmentCache {
        &self.segments
    }

    /// The result of an earlier search with this key.
    pub(crate) fn result(&self, key: &SearchKey) -> Option<Arc<SearchResult>> {
        lock(&self.results).get(key).cloned()
    }

    /// Stores the result of a search that no deadline ended.
    pub(crate) fn store(&self, key: SearchKey, result: SearchResult) {
        let mut results = lock(&self.results);
        if results.len() >= RESULTS_MAX {
            results.clear();
        }
        results.insert(key, Arc::new(result));
    }
}
