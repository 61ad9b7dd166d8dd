//! Graphs drawn in layers from top to bottom.
//!
//! A node lies one layer below the lowest of its predecessors. An edge over several layers passes the layers between
//! in slots of their own, or along a lane at the right if it is long. The lower layers of a tall graph form a second
//! column at the right of the upper ones (`graph_columns`); edges between the columns run through the gutter.

use plotters::style::RGBColor;

use super::graph_columns::GraphColumns;
use super::picture::{Anchor, Picture, Place};
use super::{INK, PAPER, blended};

/// A graph without cycles.
#[derive(Clone, Debug)]
pub struct LayeredGraph {
    /// First line of the picture.
    pub title: String,
    /// Second line of the picture: the meaning of signs.
    pub note: String,
    /// Names of the colours that nodes have.
    pub legend: Vec<(String, RGBColor)>,
    /// The nodes, predecessors first.
    pub nodes: Vec<DrawnNode>,
    /// The edges.
    pub edges: Vec<DrawnEdge>,
}

/// A box with lines of text.
#[derive(Clone, Debug)]
pub struct DrawnNode {
    /// The lines; the first is the name.
    pub lines: Vec<String>,
    /// Colour of the kind of node.
    pub colour: RGBColor,
}

/// An arrow between two nodes.
#[derive(Clone, Debug)]
pub struct DrawnEdge {
    /// Index of the node above.
    pub from: usize,
    /// Index of the node below.
    pub to: usize,
    /// Text beside the beginning of the arrow.
    pub label: String,
}

const TOP: i32 = 104;
const MARGIN: i32 = 24;
/// Width of a node that is alone in its layer, and distance between neighbours.
const NODE: (i32, i32) = (248, 18);
/// Least width of a node beside others, and estimated width of a character for the size of its text.
const NODE_MIN: i32 = 96;
const CHARACTER: f64 = 0.5;
/// Sizes of a node's name, of its other lines, and of labels.
const SIZES: [i32; 2] = [14, 12];
/// Width of a slot through which an edge passes a layer.
const SLOT: i32 = 26;
/// Width of a lane of long edges.
const LANE: i32 = 26;
/// Layers from which on an edge takes a lane.
const LONG: usize = 4;
/// Room at the right for the labels of the rightmost nodes.
const LABELS: i32 = 96;
/// Height of a line of text, room above and below, and distance between layers.
const LINE: i32 = 16;
const PADDING: i32 = 5;
const GAP: i32 = 34;
/// Distance between the lines of edges from one column to the next, in the gutter and above the next column.
const RUN: i32 = 10;
/// Room between a column and the gutter, and between the gutter and the next column.
const GUTTER: i32 = 14;
/// Width of the strip with a node's colour, and share of white in its box.
const STRIP: i32 = 6;
const TINT: f64 = 0.86;
/// Distance of a label, and of the first bend of an edge, from the node above.
const BEND: i32 = 18;
/// Room for an arrow head.
const HEAD: i32 = 8;
const WIDTH_MIN: i32 = 720;

/// Something that occupies a layer: a node, or the passage of an edge.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LayerSlot {
    Node(usize),
    Passage(usize),
}

/// Layers and places of all nodes and passages.
struct LayerPlacement {
    /// Layer of each node.
    layers: Vec<usize>,
    /// Width of each node.
    widths: Vec<i32>,
    /// Slots of each layer, from left to right.
    slots: Vec<Vec<LayerSlot>>,
    /// Centre of each slot, as in `slots`.
    centres: Vec<Vec<i32>>,
    /// Lane of each edge that has one.
    lanes: Vec<Option<usize>>,
    /// Upper and lower end of each layer.
    heights: Vec<(i32, i32)>,
    /// Distribution of the layers over columns.
    columns: GraphColumns,
    /// Right end of the slots of each column, where its lanes begin.
    rights: Vec<i32>,
    /// Left end of the lines between the columns.
    gutter: i32,
    /// Right end of everything.
    end: i32,
}

impl LayeredGraph {
    /// The picture; `None` without nodes.
    pub fn picture(&self) -> Option<Picture> {
        if self.nodes.is_empty() {
            return None;
        }
        let layout = LayerPlacement::of(self);
        let width = (layout.end + MARGIN).max(WIDTH_MIN);
        let bottom = layout.heights.iter().map(|(_, lower)| *lower).max().unwrap_or(TOP);
        let mut picture = Picture::new((width, bottom + MARGIN));
        picture.text(&self.title, (20, 20), Anchor::Start, 19);
        picture.text(&self.note, (20, 48), Anchor::Start, 13);
        for (index, (name, colour)) in self.legend.iter().enumerate() {
            let left = 20 + 150 * index as i32;
            picture.rectangle([(left, 72), (left + 14, 86)], *colour);
            picture.text(name, (left + 20, 73), Anchor::Start, 13);
        }
        let mut labelled: Vec<(usize, &str)> = vec![];
        for (index, edge) in self.edges.iter().enumerate() {
            let places = layout.route(index, edge);
            let (Some(&(left, upper)), Some(&(x, y))) = (places.first(), places.last()) else {
                continue;
            };
            picture.path(places, INK, 1);
            picture.path([(x - 4, y - 6), (x, y), (x + 4, y - 6)], INK, 1);
            if !edge.label.is_empty() && !labelled.contains(&(edge.from, &edge.label)) {
                let below = labelled.iter().filter(|(from, _)| *from == edge.from).count() as i32;
                let place = (left + 7, upper + 3 + 13 * below);
                picture.text(&edge.label, place, Anchor::Start, SIZES[1]);
                labelled.push((edge.from, &edge.label));
            }
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let (centre, upper, lower) = layout.place(index);
            let width = layout.widths[index];
            let left = centre - width / 2;
            let tint = blended(node.colour, PAPER, TINT);
            picture.rectangle([(left, upper), (left + width, lower)], tint);
            picture.rectangle([(left, upper), (left + STRIP, lower)], node.colour);
            for (line, text) in node.lines.iter().enumerate() {
                let place = (left + STRIP + 8, upper + PADDING + 1 + LINE * line as i32);
                picture.text(text, place, Anchor::Start, SIZES[line.min(1)]);
            }
        }
        Some(picture)
    }
}

impl LayerPlacement {
    fn of(graph: &LayeredGraph) -> LayerPlacement {
        let layers = layers(graph);
        let count = layers.iter().max().map_or(0, |layer| layer + 1);
        let mut slots: Vec<Vec<LayerSlot>> = vec![vec![]; count];
        for (node, layer) in layers.iter().enumerate() {
            slots[*layer].push(LayerSlot::Node(node));
        }
        let widths = node_widths(graph, &layers);
        let slot_width = |slot: &LayerSlot| match slot {
            LayerSlot::Node(node) => widths[*node],
            LayerSlot::Passage(_) => SLOT,
        };
        let row_width = |row: &[LayerSlot]| {
            row.iter().map(|slot| slot_width(slot) + NODE.1).sum::<i32>() - NODE.1
        };
        let edges: Vec<[usize; 2]> = graph.edges.iter().map(|edge| [edge.from, edge.to]).collect();
        let layer_heights: Vec<i32> =
            slots.iter().map(|row| layer_height(graph, row) + GAP).collect();
        let columns = GraphColumns::of(&layers, &edges, &layer_heights);
        // Lanes are shared by long edges that follow each other.
        let mut lane_ends: [Vec<usize>; 2] = [vec![], vec![]];
        let mut lanes = vec![None; graph.edges.len()];
        for (index, edge) in graph.edges.iter().enumerate() {
            let (mut from, to) = (layers[edge.from], layers[edge.to]);
            match columns.second() {
                Some(first) if columns.is_between(&layers, [edge.from, edge.to]) => {
                    if to == first {
                        continue;
                    }
                    from = first;
                }
                _ if to - from < LONG => {
                    slots[from + 1..to]
                        .iter_mut()
                        .for_each(|layer| layer.push(LayerSlot::Passage(index)));
                    continue;
                }
                _ => {}
            }
            let ends = &mut lane_ends[columns.column(to)];
            let lane = ends.iter().position(|end| *end <= from).unwrap_or(ends.len());
            ends.resize(ends.len().max(lane + 1), 0);
            ends[lane] = to;
            lanes[index] = Some(lane);
        }
        let mut layout = LayerPlacement {
            layers,
            widths: widths.clone(),
            slots: vec![],
            centres: vec![],
            lanes,
            heights: vec![],
            columns,
            rights: vec![],
            gutter: MARGIN,
            end: MARGIN,
        };
        let mut upper = TOP;
        let mut middle = 0;
        for (layer, mut row) in slots.iter().cloned().enumerate() {
            let column = layout.columns.column(layer);
            if column == layout.rights.len() {
                if column > 0 {
                    let runs = RUN * layout.columns.runs() as i32;
                    upper = TOP + runs;
                    layout.gutter = layout.end + GUTTER;
                    layout.end = layout.gutter + runs + GUTTER;
                }
                let rows = slots.iter().enumerate();
                let rows = rows.filter(|(layer, _)| layout.columns.column(*layer) == column);
                let widest = rows.map(|(_, row)| row_width(row)).max().unwrap_or(0);
                middle = layout.end + widest / 2;
                let right = layout.end + widest + LABELS;
                layout.rights.push(right);
                layout.end = right + LANE * lane_ends[column].len() as i32;
            }
            row.sort_by_cached_key(|slot| layout.order(graph, *slot).unwrap_or(i32::MAX));
            let mut left = middle - row_width(&row) / 2;
            let mut centres = vec![];
            for slot in &row {
                centres.push(left + slot_width(slot) / 2);
                left += slot_width(slot) + NODE.1;
            }
            let lower = upper + layer_height(graph, &row);
            layout.heights.push((upper, lower));
            layout.slots.push(row);
            layout.centres.push(centres);
            upper = lower + GAP;
        }
        layout
    }

    /// Mean centre of the predecessors of a slot in the layer above.
    fn wanted_centre(&self, graph: &LayeredGraph, slot: LayerSlot) -> Option<i32> {
        let layer = self.slots.len().checked_sub(1)?;
        let above = |edge: usize| {
            let from = graph.edges[edge].from;
            let passage = self.centre(layer, LayerSlot::Passage(edge));
            passage.or_else(|| self.centre(layer, LayerSlot::Node(from)))
        };
        let centres: Vec<i32> = match slot {
            LayerSlot::Passage(edge) => above(edge).into_iter().collect(),
            LayerSlot::Node(node) => {
                let edges = graph.edges.iter().enumerate().filter(|(_, edge)| edge.to == node);
                edges.filter_map(|(index, _)| above(index)).collect()
            }
        };
        let count = centres.len() as i32;
        (count > 0).then(|| centres.iter().sum::<i32>() / count)
    }

    /// Position of a slot in its layer: near its predecessors, or beside another predecessor of its successor.
    fn order(&self, graph: &LayeredGraph, slot: LayerSlot) -> Option<i32> {
        let LayerSlot::Node(node) = slot else { return self.wanted_centre(graph, slot) };
        let beside = || {
            let successor = graph.edges.iter().find(|edge| edge.from == node)?.to;
            let others = graph.edges.iter().filter(|edge| edge.to == successor);
            let others = others.filter(|edge| self.layers[edge.from] == self.layers[node]);
            let mut centres =
                others.filter_map(|edge| self.wanted_centre(graph, LayerSlot::Node(edge.from)));
            centres.next().map(|centre| centre + 1)
        };
        self.wanted_centre(graph, slot).or_else(beside)
    }

    fn centre(&self, layer: usize, slot: LayerSlot) -> Option<i32> {
        let index = self.slots[layer].iter().position(|other| *other == slot)?;
        Some(self.centres[layer][index])
    }

    /// Centre, upper and lower end of a node.
    fn place(&self, node: usize) -> (i32, i32, i32) {
        let layer = self.layers[node];
        let (upper, lower) = self.heights[layer];
        (self.centre(layer, LayerSlot::Node(node)).unwrap_or(0), upper, lower)
    }

    /// The corners of an edge: vertical through layers, oblique between them; horizontal to and from a lane or the gutter.
    fn route(&self, index: usize, edge: &DrawnEdge) -> Vec<Place> {
        let (begin, end) = (self.place(edge.from), self.place(edge.to));
        let (mut at, mut height) = (begin.0, begin.2 + BEND);
        let mut places = vec![(begin.0, begin.2)];
        let is_between = self.columns.is_between(&self.layers, [edge.from, edge.to]);
        if is_between {
            let run = RUN * self.columns.run(edge.from) as i32;
            let first = self.columns.second().map_or(TOP, |layer| self.heights[layer].0);
            places.push((at, height));
            at = self.gutter + run;
            places.push((at, height));
            height = first - GAP / 2 - run;
            places.push((at, height));
        }
        match self.lanes[index] {
            Some(lane) => {
                let column = self.columns.column(self.layers[edge.to]);
                let lane = self.rights[column] + LANE * lane as i32;
                let lower = end.1 - GAP / 2;
                places.extend([(at, height), (lane, height), (lane, lower), (end.0, lower)]);
            }
            None if is_between => places.push((end.0, height)),
            None => {
                let between = self.layers[edge.from] + 1..self.layers[edge.to];
                let passages = between.filter_map(|layer| {
                    let centre = self.centre(layer, LayerSlot::Passage(index))?;
                    Some((centre, self.heights[layer].0, self.heights[layer].1))
                });
                for (centre, upper, lower) in passages.chain([end]) {
                    let (above, height) = places[places.len() - 1];
                    if above != centre {
                        places.extend([(above, height + BEND), (centre, upper - HEAD)]);
                    }
                    places.push((centre, lower.min(end.1)));
                }
            }
        }
        places.push((end.0, end.1));
        places.dedup();
        places
    }
}

/// Widths of nodes: those beside others are as wide as their texts and the labels below them.
fn node_widths(graph: &LayeredGraph, layers: &[usize]) -> Vec<i32> {
    let text_width = |text: &str, size: i32| {
        (CHARACTER * f64::from(size) * text.chars().count() as f64).ceil() as i32
    };
    let width = |(index, node): (usize, &DrawnNode)| {
        if layers.iter().filter(|layer| **layer == layers[index]).count() == 1 {
            return NODE.0;
        }
        let lines = node.lines.iter().enumerate();
        let lines = lines.map(|(line, text)| text_width(text, SIZES[line.min(1)]) + STRIP + 16);
        let labels = graph.edges.iter().filter(|edge| edge.from == index);
        let labels = labels.map(|edge| text_width(&edge.label, SIZES[1]) + 10);
        lines.chain(labels).max().unwrap_or(0).max(NODE_MIN)
    };
    graph.nodes.iter().enumerate().map(width).collect()
}

/// Height of a layer with these slots.
fn layer_height(graph: &LayeredGraph, row: &[LayerSlot]) -> i32 {
    let lines = row.iter().map(|slot| match slot {
        LayerSlot::Node(node) => graph.nodes[*node].lines.len(),
        LayerSlot::Passage(_) => 1,
    });
    2 * PADDING + LINE * lines.max().unwrap_or(1) as i32
}

/// The layer of each node: below all predecessors; a node without any is just above its first successor.
fn layers(graph: &LayeredGraph) -> Vec<usize> {
    let mut layers = vec![0; graph.nodes.len()];
    for node in 0..graph.nodes.len() {
        let above = graph.edges.iter().filter(|edge| edge.to == node);
        layers[node] = above.map(|edge| layers[edge.from] + 1).max().unwrap_or(0);
    }
    for node in 0..graph.nodes.len() {
        if graph.edges.iter().all(|edge| edge.to != node) {
            let below = graph.edges.iter().filter(|edge| edge.from == node);
            let first = below.map(|edge| layers[edge.to]).min();
            layers[node] = first.map_or(0, |layer: usize| layer.saturating_sub(1));
        }
    }
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph of `nodes` nodes with one line each.
    fn graph(nodes: usize, edges: &[(usize, usize)]) -> LayeredGraph {
        let node = DrawnNode { lines: vec!["node".into()], colour: INK };
        let edge = |&(from, to)| DrawnEdge { from, to, label: "label".into() };
        LayeredGraph {
            title: String::new(),
            note: String::new(),
            legend: vec![],
            nodes: vec![node; nodes],
            edges: edges.iter().map(edge).collect(),
        }
    }

    #[test]
    fn nodes_lie_below_their_predecessors_and_sources_above_their_successors() {
        assert_eq!(layers(&graph(5, &[(0, 1), (1, 2), (0, 2), (3, 4), (2, 4)])), [0, 1, 2, 2, 3]);
    }

    #[test]
    fn boxes_do_not_overlap_and_no_edge_crosses_a_box() {
        // Two nodes side by side, a short skip and a long one.
        let low = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (1, 4), (4, 5), (5, 6), (0, 6)];
        // A chain that is drawn in two columns, with skips within them, over the end of the first one and to the first
        // node of the second one.
        let chain = (0..59).map(|node| (node, node + 1));
        let skips = [(0, 10), (28, 58), (29, 40), (27, 31), (26, 50), (40, 57)];
        let tall: Vec<_> = chain.chain(skips).collect();
        for (nodes, edges, columns) in [(7, &low[..], 1), (60, &tall[..], 2)] {
            assert_clear(&graph(nodes, edges), columns);
        }
    }

    /// Asserts that the boxes of a graph are apart, and that no edge runs through one.
    fn assert_clear(graph: &LayeredGraph, columns: usize) {
        let layout = LayerPlacement::of(graph);
        assert_eq!(layout.rights.len(), columns);
        let boxes: Vec<[i32; 4]> = (0..graph.nodes.len())
            .map(|node| layout.place(node))
            .zip(&layout.widths)
            .map(|((x, upper, lower), width)| [x - width / 2, upper, x + width / 2, lower])
            .collect();
        for (index, a) in boxes.iter().enumerate() {
            for b in &boxes[..index] {
                assert!(a[0] >= b[2] || b[0] >= a[2] || a[1] >= b[3] || b[1] >= a[3]);
            }
        }
        for (index, edge) in graph.edges.iter().enumerate() {
            let places = layout.route(index, edge);
            for ends in places.windows(2) {
                let [(ax, ay), (bx, by)] = [ends[0], ends[1]];
                let inside = |b: &[i32; 4]| {
                    ax.max(bx) > b[0] && ax.min(bx) < b[2] && ay.max(by) > b[1] && ay.min(by) < b[3]
                };
                assert!(!boxes.iter().any(inside), "{edge:?} along {ends:?}");
            }
        }
    }
}
