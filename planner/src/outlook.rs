//! What the bytes of a context allow, before anything is lowered.

use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::Context;
use narrows_plan::{Bytes, Seconds};

use crate::ends::Ends;
use crate::fit::{Divided, Fitter, NeedOf, Refusal};
use crate::segments::Part;

/// What the bytes of a context allow, for each layout of what segments hand on, most promising
/// first.
pub struct Outlook {
    pub(crate) borders: Vec<(Ends, Reach)>,
}

/// What bytes allow with one layout.
pub(crate) enum Reach {
    /// No plan is faster.
    Bound(Seconds),
    /// No plan is faster than one that is known.
    NothingFaster,
    /// None fits.
    Refused(Refusal),
}

impl Outlook {
    /// A bound on the plans of the context, which may be no better than `incumbent`; or why there
    /// are none.
    pub fn bound(&self, incumbent: f64) -> Result<Seconds, Refusal> {
        let bounds = self.borders.iter().map(|(_, reach)| reach);
        let mut refused = Refusal::NoStrategy;
        let mut least: Option<f64> = None;
        for reach in bounds {
            let bound = match reach {
                Reach::Refused(refusal) => {
                    refused = refused.gentler(refusal.clone());
                    continue;
                }
                Reach::NothingFaster => incumbent,
                Reach::Bound(bound) => bound.0,
            };
            least = Some(least.map_or(bound, |least| least.min(bound)));
        }
        least.map(Seconds).ok_or(refused)
    }
}

impl Reach {
    fn bound(&self) -> f64 {
        if let Reach::Bound(bound) = self { bound.0 } else { f64::INFINITY }
    }
}

impl Fitter<'_> {
    /// What the bytes of a context allow, before anything is lowered. Layouts that nothing faster than
    /// `incumbent` has are not followed up.
    pub fn outlook(&self, context: &Context, incumbent: f64) -> Outlook {
        let mut borders = vec![];
        for fastest in Ends::all(self.request, self.segments, context) {
            let reach = if fastest.bound.0 < incumbent {
                self.reach(context, &fastest, incumbent)
            } else {
                Reach::NothingFaster
            };
            borders.push((fastest, reach));
        }
        borders.sort_by(|a, b| a.1.bound().total_cmp(&b.1.bound()));
        Outlook { borders }
    }

    /// What the bytes allow with a border: the bound is that of ends as fast as the fastest and as
    /// small as the smallest.
    fn reach(&self, context: &Context, fastest: &Ends, incumbent: f64) -> Reach {
        let unlimited = vec![Bytes(0); context.mesh.pipeline as usize];
        let ideal = fastest.ideal(self.segments, context);
        let mut extras = self.extras(context, &ideal);
        // Other ends may spend less once a step.
        let last = extras.len() - 1;
        for (stage, end) in [(0, SegmentKind::Embedding), (last, SegmentKind::Head)] {
            let part = Part::end(end, fastest.border, fastest.tied_weight);
            let held = match end {
                SegmentKind::Embedding => &ideal.embedding,
                _ => &ideal.head,
            };
            let spared = held.time.step.0 - self.segments.step_range(part, context)[0];
            extras[stage].step_least = Seconds(extras[stage].step_least.0 - spared.max(0.0));
        }
        match self.divided(context, &ideal, &extras, &unlimited, incumbent) {
            Divided::Found(_, found) => Reach::Bound(found[0].bound),
            Divided::Interrupted => Reach::Bound(fastest.bound),
            // Nothing that fits beats the incumbent, if there is one; else nothing fits.
            Divided::Nothing(_) if incumbent.is_finite() => Reach::NothingFaster,
            Divided::Nothing(excess) => {
                let limit = self.request.memory_bytes();
                let needed = limit + excess;
                Reach::Refused(Refusal::Memory { stage: None, needed, limit, of: NeedOf::Every })
            }
        }
    }
}
