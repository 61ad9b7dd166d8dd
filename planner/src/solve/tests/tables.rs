//! Cost tables for solvers: random tables from a sequence of draws, and a chain that resembles a block.

use narrows_cost_model::{
    CostTable, MemoryRow, MemoryRowId, TableChoice, TableLink, TableNode, TableNodeId,
};
use narrows_plan::random::SplitMix64;
use narrows_plan::{Bytes, Seconds};

/// A finite sequence of random numbers. After its end every draw is 0, so that shrinking the sequence
/// simplifies the table.
pub struct Draws<'a> {
    draws: std::slice::Iter<'a, u16>,
}

impl<'a> Draws<'a> {
    pub fn new(draws: &'a [u16]) -> Draws<'a> {
        Draws { draws: draws.iter() }
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.draws.next().map_or(0, |&draw| draw as usize % n)
    }
}

/// The first `n` draws of a seed.
pub fn seeded_draws(seed: u64, n: usize) -> Vec<u16> {
    let mut random = SplitMix64::new(seed);
    (0..n).map(|_| (random.next_u64() >> 16) as u16).collect()
}

pub fn node(name: impl Into<String>, choices: Vec<TableChoice>) -> TableNode {
    TableNode { name: name.into(), choices }
}

pub fn choice(time: f64, bytes: &[(u32, u64)]) -> TableChoice {
    let bytes = bytes.iter().map(|&(row, bytes)| (MemoryRowId(row), Bytes(bytes))).collect();
    TableChoice { time: Seconds(time), bytes }
}

fn link(from: usize, to: usize, demand: Vec<Option<u8>>, offer: Vec<u64>) -> TableLink {
    TableLink { from: TableNodeId(from as u32), to: TableNodeId(to as u32), demand, offer }
}

/// Distribution of the times and bytes of a table.
#[derive(Clone, Copy)]
enum Spread {
    /// Microseconds to seconds, bytes to gigabytes, with many ties and zeros.
    Wide,
    /// Within one order of magnitude, so that choices differ little.
    Narrow,
}

impl Spread {
    fn draw(draws: &mut Draws) -> Spread {
        [Spread::Wide, Spread::Narrow][draws.below(2)]
    }

    fn time(self, draws: &mut Draws) -> f64 {
        match self {
            Spread::Wide => {
                let scale = [1e-6, 1e-5, 1e-4, 1e-3, 1.0][draws.below(5)];
                draws.below(11) as f64 * scale
            }
            Spread::Narrow => 1e-3 + draws.below(1000) as f64 * 1e-6,
        }
    }

    fn bytes(self, draws: &mut Draws) -> u64 {
        match (self, draws.below(4)) {
            (Spread::Narrow, _) => (64 + draws.below(256) as u64) << 20,
            (_, 0) => 0,
            (_, 1) => draws.below(5) as u64,
            (_, 2) => (draws.below(16) as u64) << 20,
            _ => ((draws.below(16) as u64) << 28) + draws.below(2) as u64,
        }
    }
}

/// An unstructured table of up to 7 nodes with up to 5 choices each: independent demands and offers, cycles,
/// parallel links in both directions, and `rows` memory rows.
pub fn draw_table(draws: &mut Draws, rows: usize) -> CostTable {
    let spread = Spread::draw(draws);
    let nodes: Vec<TableNode> = (0..1 + draws.below(7))
        .map(|n| {
            let choices = (0..1 + draws.below(5)).map(|_| {
                let used: Vec<_> = (0..rows as u32).map(|row| (row, spread.bytes(draws))).collect();
                choice(spread.time(draws), &used)
            });
            node(format!("n{n}"), choices.collect())
        })
        .collect();
    let mut links = Vec::new();
    for _ in 0..draws.below(2 * nodes.len()) {
        let (from, to) = (draws.below(nodes.len()), draws.below(nodes.len()));
        let keys = 1 + draws.below(3);
        let demand = nodes[from].choices.iter().map(|_| match draws.below(keys + 1) {
            0 => None,
            key => Some(key as u8 * 20),
        });
        let demand = demand.collect();
        let offer = nodes[to].choices.iter().map(|_| {
            let keys = (1..=keys).filter(|_| draws.below(5) < 3);
            keys.fold(0, |mask, key| mask | 1 << (key * 20))
        });
        links.push(link(from, to, demand, offer.collect()));
    }
    let mut table = CostTable { nodes, links, rows: vec![] };
    add_rows(&mut table, draws, rows);
    table
}

/// Adds memory rows whose limits are the bytes of a random assignment, or a little less.
fn add_rows(table: &mut CostTable, draws: &mut Draws, rows: usize) {
    for row in 0..rows {
        let mut attained = 0;
        for node in &table.nodes {
            let choice = &node.choices[draws.below(node.choices.len())];
            attained +=
                choice.bytes.iter().filter(|b| b.0.0 as usize == row).map(|b| b.1.0).sum::<u64>();
        }
        let off = [0, 0, 1, 1 << 20][draws.below(4)];
        let limit = Bytes(attained.saturating_sub(off));
        table.rows.push(MemoryRow { name: format!("row {row}"), limit });
    }
}

/// A table of 2 to 5 ops in a chain with skips, whose outputs are absent, kept or recomputed.
///
/// Node `2i` is op `i` in one of a few layouts; it demands its input's layout. Node `2i+1` is the
/// state of its output: 0 absent, 1 kept (costs bytes), 2 recomputed (costs time, and needs the inputs
/// of the op). The backward pass of an op may need its inputs, depending on the op's layout.
pub fn draw_keep_recompute_table(draws: &mut Draws, rows: usize) -> CostTable {
    let spread = Spread::draw(draws);
    let ops = 2 + draws.below(4);
    let mut table = CostTable::default();
    for i in 0..ops {
        let layouts = 2 + draws.below(2);
        let op = (0..layouts).map(|_| choice(spread.time(draws), &[])).collect();
        table.nodes.push(node(format!("op{i}"), op));
        let used: Vec<_> = (0..rows as u32).map(|row| (row, spread.bytes(draws))).collect();
        let states = vec![choice(0.0, &[]), choice(0.0, &used), choice(spread.time(draws), &[])];
        table.nodes.push(node(format!("state{i}"), states));
        for _ in 0..if i == 0 { 0 } else { 1 + draws.below(2) } {
            let input = draws.below(i);
            let offered = table.nodes[2 * input].choices.len();
            let demand = (0..layouts).map(|_| Some(draws.below(offered) as u8)).collect();
            let offer = (0..offered).map(|layout| 1 << layout).collect();
            table.links.push(link(2 * i, 2 * input, demand, offer));
            // Available: kept or recomputed.
            let available = vec![0, 1, 1];
            let needs = (0..layouts).map(|_| (draws.below(3) > 0).then_some(0)).collect();
            table.links.push(link(2 * i, 2 * input + 1, needs, available.clone()));
            let recompute = vec![None, None, Some(0)];
            table.links.push(link(2 * i + 1, 2 * input + 1, recompute, available));
        }
    }
    add_rows(&mut table, draws, rows);
    table
}

/// A chain that resembles the ops and reshards of a transformer block: `nodes` nodes of 5 to 60 choices.
/// A choice has an input and an output layout; faster choices use more bytes. Every seventh node is also
/// linked to the fifth before it, as by a residual. With `share_of_limit`, each of four memory rows has a
/// limit at this share of the range between its smallest and its largest bytes.
pub fn chain_table(nodes: usize, seed: u64, share_of_limit: Option<f64>) -> CostTable {
    let sequence = seeded_draws(seed, 400 * nodes);
    let mut draws = Draws::new(&sequence);
    let layouts = 4;
    let mut table = CostTable::default();
    let mut outputs: Vec<Vec<u64>> = Vec::new();
    for n in 0..nodes {
        let size = 5 + draws.below(56);
        let mut choices = Vec::new();
        let (mut input, mut output) = (Vec::new(), Vec::new());
        for _ in 0..size {
            let time = 1e-5 + draws.below(10_000) as f64 * 1e-7;
            let kept = (draws.below(64) as u64 + (1.1e-3 / time).min(64.0) as u64) << 20;
            let used = [(0, kept), (1 + (n % 3) as u32, kept / 2)];
            choices.push(choice(time, if share_of_limit.is_some() { &used } else { &[] }));
            input.push(Some(draws.below(layouts) as u8));
            output.push(1 << draws.below(layouts));
        }
        table.nodes.push(node(format!("op{n}"), choices));
        if n > 0 {
            table.links.push(link(n, n - 1, input.clone(), outputs[n - 1].clone()));
        }
        if n >= 5 && n % 7 == 0 {
            table.links.push(link(n, n - 5, input, outputs[n - 5].clone()));
        }
        outputs.push(output);
    }
    if let Some(share) = share_of_limit {
        for row in 0..4 {
            let bytes_of = |node: &TableNode, pick: fn(u64, u64) -> u64, first: u64| {
                let used = node
                    .choices
                    .iter()
                    .map(|c| c.bytes.iter().filter(|b| b.0.0 == row).map(|b| b.1.0).sum::<u64>());
                used.fold(first, pick)
            };
            let least: u64 = table.nodes.iter().map(|n| bytes_of(n, u64::min, u64::MAX)).sum();
            let most: u64 = table.nodes.iter().map(|n| bytes_of(n, u64::max, 0)).sum();
            let limit = Bytes(least + ((most - least) as f64 * share) as u64);
            table.rows.push(MemoryRow { name: format!("row {row}"), limit });
        }
    }
    table
}
