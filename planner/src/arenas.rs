//! Arenas of lowered plans, shared by searches.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::lock::lock;
use narrows_plan::{Bytes, Plan, PlanSource};
use sha2::{Digest as _, Sha256};

/// SHA-256 of all of a plan that its lowering depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PlanDigest([u8; 32]);

impl PlanDigest {
    /// The digest of a plan. Plans for different hardware are lowered alike.
    pub(crate) fn new(plan: &Plan) -> PlanDigest {
        let hardware = PlanSource { name: String::new(), fingerprint: String::new() };
        let plan = Plan { hardware, ..plan.clone() };
        let json = serde_json::to_vec(&plan).expect("plans are written as JSON");
        PlanDigest(Sha256::digest(json).into())
    }
}

/// Arenas of the stages of lowered plans.
#[derive(Default)]
pub(crate) struct ArenaCache {
    by_plan: Mutex<HashMap<PlanDigest, Arc<[Bytes]>>>,
}

/// Plans from which on the cache is emptied: about 10 MB.
const PLANS_MAX: usize = 100_000;

impl ArenaCache {
    /// The arenas of a plan's stages, if the plan was lowered before.
    pub(crate) fn get(&self, plan: &PlanDigest) -> Option<Arc<[Bytes]>> {
        lock(&self.by_plan).get(plan).cloned()
    }

    /// Stores the arenas of a plan's stages.
    pub(crate) fn insert(&self, plan: PlanDigest, arenas: Arc<[Bytes]>) {
        let mut by_plan = lock(&self.by_plan);
        if by_plan.len() >= PLANS_MAX {
            by_plan.clear();
        }
        by_plan.insert(plan, arenas);
    }
}
