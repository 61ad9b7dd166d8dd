//! The constraint graph of a table, and the order in which elimination removes its variables.
//!
//! Many choices of a node are equal to a link: an op has many choices with the same output layout. Each
//! relation between two nodes therefore gets a variable of its own, its *key*, when the choices of one end
//! fall into fewer classes than there are choices. The choice of that end determines the key, and the
//! relation to the other end is one between its choices and the key. Eliminating an end then leaves a table
//! over keys instead of choices, which is smaller by orders of magnitude around values with many consumers.
//!
//! The order is greedy: the variable whose elimination is the least work, then the fewest new edges.

use std::collections::{BTreeMap, BTreeSet};

use fixedbitset::FixedBitSet;
use narrows_cost_model::TableLink;

use super::full_set;

/// The compatible pairs of values of two variables.
#[derive(Clone, Debug)]
pub(super) struct Relation {
    /// The two variables.
    pub endpoints: [usize; 2],
    /// For each end and each of its values, the values of the other end.
    pub compatible: [Vec<FixedBitSet>; 2],
}

/// The variables of a table and the relations between them: nodes first, then keys.
#[derive(Clone, Debug)]
pub(super) struct ConstraintGraph {
    /// Number of values of each variable.
    pub sizes: Vec<usize>,
    /// Choices that the links of a node to itself allow, by node.
    pub allowed: Vec<FixedBitSet>,
    /// Relations between two variables.
    pub relations: Vec<Relation>,
}

impl Relation {
    /// A relation from the partners of each value of the first end; `size` values at the second end.
    fn new(endpoints: [usize; 2], forward: Vec<FixedBitSet>, size: usize) -> Relation {
        let mut backward = vec![FixedBitSet::with_capacity(forward.len()); size];
        for (a, partners) in forward.iter().enumerate() {
            partners.ones().for_each(|b| backward[b].insert(a));
        }
        Relation { endpoints, compatible: [forward, backward] }
    }

    /// All links between two nodes as one relation.
    pub(super) fn fused(sizes: &[usize], endpoints: [usize; 2], links: &[&TableLink]) -> Relation {
        let sizes = endpoints.map(|node| sizes[node]);
        let mut forward = vec![full_set(sizes[1]); sizes[0]];
        for link in links {
            let first = usize::from(link.from.0 as usize != endpoints[0]);
            // The offering choices of each key.
            let keys = link.demand.iter().flatten().max().map_or(0, |key| usize::from(*key) + 1);
            let mut offering = vec![FixedBitSet::with_capacity(link.offer.len()); keys];
            for (choice, offer) in link.offer.iter().enumerate() {
                let offered = (0..keys).filter(|key| offer & (1 << key) != 0);
                offered.for_each(|key| offering[key].insert(choice));
            }
            for (choice, key) in link.demand.iter().enumerate() {
                let Some(offering) = key.map(|key| &offering[usize::from(key)]) else { continue };
                if first == 0 {
                    forward[choice].intersect_with(offering);
                } else {
                    (0..sizes[0])
                        .filter(|&other| !offering.contains(other))
                        .for_each(|other| forward[other].remove(choice));
                }
            }
        }
        Relation::new(endpoints, forward, sizes[1])
    }

    /// The values of an end, classified by their partners.
    fn classes(&self, end: usize) -> ValueClasses {
        let mut classes = ValueClasses::default();
        self.compatible[end].iter().for_each(|partners| classes.push(partners));
        classes
    }
}

/// The values of a variable, classified by their partners in another one.
#[derive(Default)]
struct ValueClasses {
    class: Vec<usize>,
    partners: Vec<FixedBitSet>,
}

impl ValueClasses {
    /// Adds a value.
    fn push(&mut self, partners: &FixedBitSet) {
        let known = self.partners.iter().position(|known| known == partners);
        self.class.push(known.unwrap_or(self.partners.len()));
        if known.is_none() {
            self.partners.push(partners.clone());
        }
    }
}

/// The demanding choices, classified by the offering choices that all links together allow.
fn demand_classes(links: &[&TableLink]) -> ValueClasses {
    let offers = links[0].offer.len();
    let demand = |choice: usize| links.iter().map(move |link| link.demand[choice]);
    let mut classes = ValueClasses::default();
    for choice in 0..links[0].demand.len() {
        // Equal demands have equal partners.
        let equal = (0..choice).find(|&other| demand(other).eq(demand(choice)));
        if let Some(other) = equal {
            classes.class.push(classes.class[other]);
            continue;
        }
        let mut partners = FixedBitSet::with_capacity(offers);
        let is_met = |other: usize| {
            let mut keys = links.iter().zip(demand(choice));
            keys.all(|(link, key)| key.is_none_or(|key| link.offer[other] & (1 << key) != 0))
        };
        (0..offers).filter(|&other| is_met(other)).for_each(|other| partners.insert(other));
        classes.push(&partners);
    }
    classes
}

/// Links by the two nodes they connect, the lower index first.
pub(super) fn links_between(links: &[TableLink]) -> BTreeMap<[usize; 2], Vec<&TableLink>> {
    let mut between: BTreeMap<[usize; 2], Vec<&TableLink>> = BTreeMap::new();
    for link in links {
        let (from, to) = (link.from.0 as usize, link.to.0 as usize);
        if from != to {
            between.entry([from.min(to), from.max(to)]).or_default().push(link);
        }
    }
    between
}

/// Choices that the links of a node to itself allow, by node.
pub(super) fn self_consistent(sizes: &[usize], links: &[TableLink]) -> Vec<FixedBitSet> {
    let mut allowed: Vec<FixedBitSet> = sizes.iter().map(|&size| full_set(size)).collect();
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
    /// The graph of nodes with these numbers of choices, and their links.
    pub(super) fn new(sizes: Vec<usize>, links: &[TableLink]) -> ConstraintGraph {
        let allowed = self_consistent(&sizes, links);
        let mut graph = ConstraintGraph { sizes, allowed, relations: vec![] };
        for (endpoints, links) in links_between(links) {
            graph.relate(endpoints, &links);
        }
        graph
    }

    /// Adds the relation of the links between two nodes, through a key where that has fewer values.
    fn relate(&mut self, endpoints: [usize; 2], links: &[&TableLink]) {
        let from = links[0].from.0 as usize;
        let mut classes = if links.iter().all(|link| link.from.0 as usize == from) {
            demand_classes(links)
        } else {
            Relation::fused(&self.sizes, endpoints, links)
                .classes(usize::from(from != endpoints[0]))
        };
        let far = if from == endpoints[0] { endpoints[1] } else { endpoints[0] };
        let all = full_set(self.sizes[far]);
        if classes.partners.iter().all(|partners| all.is_subset(partners)) {
            return;
        }
        let keys = classes.partners.len();
        if keys == self.sizes[from] {
            let of_class = |&class: &usize| classes.partners[class].clone();
            let partners = classes.class.iter().map(of_class).collect();
            self.relations.push(Relation::new([from, far], partners, self.sizes[far]));
            return;
        }
        let key = self.sizes.len();
        self.sizes.push(keys);
        let only = |class: usize| {
            let mut set = FixedBitSet::with_capacity(keys);
            set.insert(class);
            set
        };
        let determined = classes.class.drain(..).map(only).collect();
        self.relations.push(Relation::new([from, key], determined, keys));
        self.relations.push(Relation::new([key, far], classes.partners, self.sizes[far]));
    }

    /// Every variable in the order of elimination, with its neighbours at that time; `root` last.
    pub(super) fn order(&self, root: Option<usize>) -> Vec<(usize, Vec<usize>)> {
        let mut neighbours = vec![BTreeSet::new(); self.sizes.len()];
        // Average number of values of the second variable that go with a value of the first.
        let mut shares: BTreeMap<[usize; 2], f64> = BTreeMap::new();
        for Relation { endpoints: [a, b], compatible: partners } in &self.relations {
            neighbours[*a].insert(*b);
            neighbours[*b].insert(*a);
            let pairs: usize = partners[0].iter().map(|set| set.count_ones(..)).sum();
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
        let mut remaining: Vec<usize> = (0..self.sizes.len()).collect();
        let mut order = vec![];
        while !remaining.is_empty() {
            let least = remaining
                .iter()
                .enumerate()
                .filter(|(_, v)| Some(**v) != root || remaining.len() == 1)
                .min_by(|(_, a), (_, b)| {
                    let by_work = works[**a].total_cmp(&works[**b]);
                    by_work.then_with(|| fill(**a, &neighbours).cmp(&fill(**b, &neighbours)))
                });
            let (at, &node) = least.expect("a variable remains, the root last");
            remaining.remove(at);
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
