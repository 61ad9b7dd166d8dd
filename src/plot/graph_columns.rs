//! Distribution of the layers of a tall graph over two columns.
//!
//! The second column begins at the layer where the fewest nodes above have edges to nodes below, among the layers that
//! leave both columns about equally high.

/// Height in pixels up to which a graph has one column.
const ONE_COLUMN_MAX: i32 = 1000;
/// Least share of the height that a column has.
const SHARE_MIN: f64 = 0.4;

/// The columns of a graph.
pub struct GraphColumns {
    /// First layer of the second column.
    second: Option<usize>,
    /// Nodes of the first column with edges to the second one.
    sources: Vec<usize>,
}

impl GraphColumns {
    /// Distributes layers of these heights, with the layer of each node and the two nodes of each edge.
    pub fn of(layers: &[usize], edges: &[[usize; 2]], heights: &[i32]) -> GraphColumns {
        let total: i32 = heights.iter().sum();
        if total <= ONE_COLUMN_MAX {
            return GraphColumns { second: None, sources: vec![] };
        }
        let sources = |second: usize| {
            let between =
                edges.iter().filter(|[from, to]| layers[*from] < second && second <= layers[*to]);
            let mut sources: Vec<usize> = between.map(|[from, _]| *from).collect();
            sources.sort_unstable();
            sources.dedup();
            sources
        };
        let above = |second: usize| heights[..second].iter().sum::<i32>();
        let higher = |second: usize| above(second).max(total - above(second));
        let is_balanced =
            |second: &usize| f64::from(higher(*second)) <= (1.0 - SHARE_MIN) * f64::from(total);
        let candidates = (1..heights.len()).filter(is_balanced);
        let second = candidates.min_by_key(|second| (sources(*second).len(), higher(*second)));
        GraphColumns { second, sources: second.map(sources).unwrap_or_default() }
    }

    /// The first layer of the second column, if there is one.
    pub fn second(&self) -> Option<usize> {
        self.second
    }

    /// Index of the column of a layer.
    pub fn column(&self, layer: usize) -> usize {
        usize::from(self.second.is_some_and(|second| layer >= second))
    }

    /// Whether an edge between two nodes leads from the first column to the second one.
    pub fn is_between(&self, layers: &[usize], edge: [usize; 2]) -> bool {
        let [from, to] = edge.map(|node| self.column(layers[node]));
        from < to
    }

    /// Number of lines between the columns: one for each node with edges to the second column.
    pub fn runs(&self) -> usize {
        self.sources.len()
    }

    /// Index of the line of a node among those between the columns.
    pub fn run(&self, node: usize) -> usize {
        self.sources.iter().position(|source| *source == node).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tall_graphs_are_divided_where_the_fewest_edges_are() {
        // A chain of ten nodes with skips; node 5 alone has edges to later layers than its own.
        let layers: Vec<usize> = (0..10).collect();
        let mut edges: Vec<[usize; 2]> = (0..9).map(|node| [node, node + 1]).collect();
        edges.extend([[0, 5], [3, 5], [5, 9]]);
        let low = GraphColumns::of(&layers, &edges, &[100; 10]);
        assert_eq!((low.second(), low.runs(), low.column(9)), (None, 0, 0));
        let tall = GraphColumns::of(&layers, &edges, &[200; 10]);
        assert_eq!((tall.second(), tall.runs(), tall.run(5)), (Some(6), 1, 0));
        assert!(tall.is_between(&layers, [5, 9]) && !tall.is_between(&layers, [3, 5]));
    }
}
