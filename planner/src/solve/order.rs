//! In which order elimination removes what a table has.
//!
//! A link rarely tells all choices of a node apart: an op has many choices that leave its output in
//! the same layout. So each relation between two nodes gets a variable of its own, its *key*, when
//! the choices of one end fall into fewer classes than there are choices. The choice of that end
//! determines the key, and the other end sees only the key. Once an end is removed, what it leaves
//! is a table over keys and not over choices, which is smaller by orders of magnitude around values
//! with many consumers.
//!
//! The order is greedy: the variable whose removal is the least work, then the least new edges.

use std::collections::{BTreeMap, BTreeSet};

use narrows_cost_model::TableLink;

use super::bits::Bits;

/// Which values of two variables go together.
#[derive(Clone, Debug)]
pub(super) struct Relation {
    /// The two variables.
    pub(super) ends: [usize; 2],
    /// For each end and each of its values, the values of the other end.
    pub(super) partners: [Vec<Bits>; 2],
}

/// The variables of a table, and what relates them: its nodes, then the keys of its links.
#[derive(Clone, Debug)]
pub(super) struct ConstraintGraph {
    /// How many values each variable has.
    pub(super) sizes: Vec<usize>,
    /// By node: the choices that its links to itself allow.
    pub(super) allowed: Vec<Bits>,
    /// What must go together.
    pub(super) relations: Vec<Relation>,
}

impl Relation {
    /// From the values of the first end to those of the second.
    fn new(ends: [usize; 2], forward: Vec<Bits>, size: usize) -> Relation {
        let mut backward = vec![Bits::empty(forward.len()); size];
        for (a, partners) in forward.iter().enumerate() {
            partners.iter().for_each(|b| backward[b].insert(a));
        }
        Relation { ends, partners: [forward, backward] }
    }

    /// All links between two nodes as one relation.
    pub(super) fn fused(sizes: &[usize], ends: [usize; 2], links: &[&TableLink]) -> Relation {
        let sizes = ends.map(|node| sizes[node]);
        let mut forward = vec![Bits::full(sizes[1]); sizes[0]];
        for link in links {
            let first = usize::from(link.from.0 as usize != ends[0]);
            // The offering choices of each key.
            let keys = link.demand.iter().flatten().max().map_or(0, |key| usize::from(*key) + 1);
            let mut offering = vec![Bits::empty(link.offer.len()); keys];
            for (choice, offer) in link.offer.iter().enumerate() {
                let offered = (0..keys).filter(|key| offer & (1 << key) != 0);
                offered.for_each(|key| offering[key].insert(choice));
            }
            for (choice, key) in link.demand.iter().enumerate() {
                let Some(offering) = key.map(|key| &offering[usize::from(key)]) else { continue };
                if first == 0 {
                    forward[choice] = forward[choice].and(offering);
                } else {
                    (0..sizes[0])
                        .filter(|&other| !offering.contains(other))
                        .for_each(|other| forward[other].remove(choice));
                }
            }
        }
        Relation::new(ends, forward, sizes[1])
    }

    /// The values of an end by what they go with.
    fn classes(&self, end: usize) -> ValueClasses {
        let mut made = ValueClasses::default();
        self.partners[end].iter().for_each(|partners| made.push(partners));
        made
    }
}

/// The values of a variable, classed by their partners in another one.
#[derive(Default)]
struct ValueClasses {
    class: Vec<usize>,
    partners: Vec<Bits>,
}

impl ValueClasses {
    /// One more value.
    fn push(&mut self, partners: &Bits) {
        let known = self.partners.iter().position(|known| known == partners);
        self.class.push(known.unwrap_or(self.partners.len()));
        if known.is_none() {
            self.partners.push(partners.clone());
        }
    }
}

/// The choices that demand, by what all links together let them go with.
fn demands(links: &[&TableLink]) -> ValueClasses {
    let offers = links[0].offer.len();
    let demand = |choice: usize| links.iter().map(move |link| link.demand[choice]);
    let mut made = ValueClasses::default();
    for choice in 0..links[0].demand.len() {
        // What demands the same has the same partners.
        let alike = (0..choice).find(|&other| demand(other).eq(demand(choice)));
        if let Some(other) = alike {
            made.class.push(made.class[other]);
            continue;
        }
        let mut partners = Bits::empty(offers);
        let met = |other: usize| {
            let mut keys = links.iter().zip(demand(choice));
            keys.all(|(link, key)| key.is_none_or(|key| link.offer[other] & (1 << key) != 0))
        };
        (0..offers).filter(|&other| met(other)).for_each(|other| partners.insert(other));
        made.push(&partners);
    }
    made
}

/// Links by the nodes they are between, the lower one first.
pub(super) fn between(links: &[TableLink]) -> BTreeMap<[usize; 2], Vec<&TableLink>> {
    let mut fused: BTreeMap<[usize; 2], Vec<&TableLink>> = BTreeMap::new();
    for link in links {
        let (from, to) = (link.from.0 as usize, link.to.0 as usize);
        if from != to {
            fused.entry([from.min(to), from.max(to)]).or_default().push(link);
        }
    }
    fused
}

/// By node: the choices that its links to itself allow.
pub(super) fn self_consistent(sizes: &[usize], links: &[TableLink]) -> Vec<Bits> {
    let mut allowed: Vec<Bits> = sizes.iter().map(|&size| Bits::full(size)).collect();
    for link in links.iter().filter(|link| link.from == link.to) {
        for (choice, (demand, offer)) in link.demand.iter().zip(&link.offer).enumerate() {
            if demand.is_some_and(|key| offer & (1 << key) == 0) {
                allowed[link.from.0 as usize].remove(choice);
            }
        }
    }
    allowed
}

impl ConstraintGraph {
    /// Of nodes with so many choices and their links.
    pub(super) fn new(sizes: Vec<usize>, links: &[TableLink]) -> ConstraintGraph {
        let allowed = self_consistent(&sizes, links);
        let mut network = ConstraintGraph { sizes, allowed, relations: vec![] };
        for (ends, links) in between(links) {
            network.relate(ends, &links);
        }
        network
    }

    /// Adds what the links between two nodes demand, by a key where that tells fewer values apart.
    fn relate(&mut self, ends: [usize; 2], links: &[&TableLink]) {
        let from = links[0].from.0 as usize;
        let mut seen = if links.iter().all(|link| link.from.0 as usize == from) {
            demands(links)
        } else {
            Relation::fused(&self.sizes, ends, links).classes(usize::from(from != ends[0]))
        };
        let far = if from == ends[0] { ends[1] } else { ends[0] };
        let all = Bits::full(self.sizes[far]);
        if seen.partners.iter().all(|partners| partners.covers(&all)) {
            return;
        }
        let keys = seen.partners.len();
        if keys == self.sizes[from] {
            let partners = seen.class.iter().map(|&class| seen.partners[class].clone()).collect();
            self.relations.push(Relation::new([from, far], partners, self.sizes[far]));
            return;
        }
        let key = self.sizes.len();
        self.sizes.push(keys);
        let only = |class: usize| {
            let mut bits = Bits::empty(keys);
            bits.insert(class);
            bits
        };
        let determined = seen.class.drain(..).map(only).collect();
        self.relations.push(Relation::new([from, key], determined, keys));
        self.relations.push(Relation::new([key, far], seen.partners, self.sizes[far]));
    }

    /// Every variable, in the order of removal, with its neighbours at that time; `root` last.
    pub(super) fn order(&self, root: Option<usize>) -> Vec<(usize, Vec<usize>)> {
        let mut neighbours = vec![BTreeSet::new(); self.sizes.len()];
        // How many values of a neighbour go with a value, on average, by both.
        let mut shares: BTreeMap<[usize; 2], f64> = BTreeMap::new();
        for Relation { ends: [a, b], partners } in &self.relations {
            neighbours[*a].insert(*b);
            neighbours[*b].insert(*a);
            let pairs: usize = partners[0].iter().map(Bits::len).sum();
            shares.insert([*a, *b], pairs as f64 / self.sizes[*a] as f64);
            shares.insert([*b, *a], pairs as f64 / self.sizes[*b] as f64);
        }
        let work = |node: usize, neighbours: &[BTreeSet<usize>]| -> f64 {
            let size = |other: &usize| {
                shares.get(&[node, *other]).copied().unwrap_or(self.sizes[*other] as f64)
            };
            self.sizes[node] as f64 * neighbours[node].iter().map(size).product::<f64>()
        };
        let fill = |node: usize, neighbours: &[BTreeSet<usize>]| -> usize {
            let around = &neighbours[node];
            let missing = |&a: &usize| around.iter().filter(|b| !neighbours[a].contains(b)).count();
            around.iter().map(missing).sum()
        };
        let mut works: Vec<f64> = (0..self.sizes.len()).map(|v| work(v, &neighbours)).collect();
        let mut left: Vec<usize> = (0..self.sizes.len()).collect();
        let mut order = vec![];
        while !left.is_empty() {
            let least = left
                .iter()
                .enumerate()
                .filter(|(_, v)| Some(**v) != root || left.len() == 1)
                .min_by(|(_, a), (_, b)| {
                    let by_work = works[**a].total_cmp(&works[**b]);
                    by_work.then_with(|| fill(**a, &neighbours).cmp(&fill(**b, &neighbours)))
                });
            let (at, &node) = least.expect("something is left besides the root");
            left.remove(at);
            let scope: Vec<usize> = neighbours[node].iter().copied().collect();
            for &a in &scope {
                neighbours[a].remove(&node);
                neighbours[a].extend(scope.iter().copied().filter(|&b| b != a));
            }
            scope.iter().for_each(|&a| works[a] = work(a, &neighbours));
            order.push((node, scope));
        }
        order
    }
}
