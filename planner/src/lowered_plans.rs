//! Arenas and programs of lowered plans, shared by searches.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use narrows_plan::{Bytes, CheckedProgram, Plan, PlanSource};
use sha2::{Digest as _, Sha256};

use crate::lock::lock;
use crate::most_recent::MostRecent;

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

/// Arenas of lowered plans, and the programs of those lowered last.
#[derive(Default)]
pub(crate) struct LoweredPlans {
    arenas: Mutex<HashMap<PlanDigest, Arc<[Bytes]>>>,
    programs: Mutex<MostRecent<(PlanDigest, CheckedProgram), PROGRAMS_MAX>>,
}

/// Arenas from which on they are forgotten: about 10 MB.
const ARENAS_MAX: usize = 100_000;

/// Programs that are kept, each of about a megabyte: in a sweep, neighbouring points have few plans among them.
const PROGRAMS_MAX: usize = 64;

impl LoweredPlans {
    /// The arenas of a plan's stages, if the plan was lowered before: of all stages, or of the first ones.
    pub(crate) fn arenas(&self, plan: &PlanDigest) -> Option<Arc<[Bytes]>> {
        lock(&self.arenas).get(plan).cloned()
    }

    /// Stores the arenas of a plan's stages, or of the first ones.
    pub(crate) fn insert_arenas(&self, plan: PlanDigest, of_stages: Arc<[Bytes]>) {
        let mut arenas = lock(&self.arenas);
        if arenas.len() >= ARENAS_MAX {
            arenas.clear();
        }
        arenas.insert(plan, of_stages);
    }

    /// The program of a plan, if it is one of those lowered last.
    pub(crate) fn program(&self, plan: &PlanDigest) -> Option<CheckedProgram> {
        let is_same = |(known, _): &(PlanDigest, CheckedProgram)| known == plan;
        lock(&self.programs).find(is_same).map(|(_, program)| program.clone())
    }

    /// Stores the program of a plan.
    pub(crate) fn insert_program(&self, plan: PlanDigest, program: CheckedProgram) {
        let is_same = |(known, _): &(PlanDigest, CheckedProgram)| *known == plan;
        lock(&self.programs).find_or_insert_with(is_same, || (plan, program));
    }
}
