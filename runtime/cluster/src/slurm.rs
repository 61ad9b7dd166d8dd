//! Slurm's notations for lists of hosts and for the tasks of each node.

/// Numbers of tasks of the nodes of a step: `8(x2),4` stands for 8, 8 and 4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TaskCounts(Vec<TaskRun>);

/// Consecutive nodes with equally many tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TaskRun {
    tasks: u64,
    nodes: u64,
}

impl TaskCounts {
    /// Parses a list; `None` for text that is no such list.
    pub(crate) fn parse(list: &str) -> Option<TaskCounts> {
        let run = |text: &str| match text.split_once("(x") {
            None => Some(TaskRun { tasks: text.parse().ok()?, nodes: 1 }),
            Some((tasks, nodes)) => Some(TaskRun {
                tasks: tasks.parse().ok()?,
                nodes: nodes.strip_suffix(')')?.parse().ok()?,
            }),
        };
        list.trim().split(',').map(run).collect::<Option<Vec<TaskRun>>>().map(TaskCounts)
    }

    /// Number of tasks of a node; `None` for an index beyond the last node.
    pub(crate) fn on_node(&self, mut node: u64) -> Option<u64> {
        for run in &self.0 {
            match node.checked_sub(run.nodes) {
                None => return Some(run.tasks),
                Some(rest) => node = rest,
            }
        }
        None
    }
}

/// The first host of a list in Slurm's notation: `gpu07` of `gpu[07-09,12],login1`. `None` for what is no such list, as
/// `(null)`, an empty list, and one whose bracket is not closed.
pub(crate) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(character) = rest.chars().next().filter(|character| *character != ',') {
        rest = &rest[character.len_utf8()..];
        match character {
            '[' => {
                let (numbers, after) = rest.split_once(']')?;
                let first = numbers.split([',', '-']).next().filter(|first| !first.is_empty())?;
                host.push_str(first);
                rest = after;
            }
            ']' | '(' | ')' => return None,
            character if character.is_whitespace() => return None,
            character => host.push(character),
        }
    }
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list_is_read() {
        let cases = [
            ("a", "a"),
            ("a,b", "a"),
            ("gpu[3]", "gpu3"),
            ("gpu[007-012,20],login", "gpu007"),
            ("r[1-2]n[03-04].cluster", "r1n03.cluster"),
            (" gpu-a-[1,3-5] ", "gpu-a-1"),
            ("[04-05]", "04"),
        ];
        for (list, host) in cases {
            assert_eq!(first_host(list).as_deref(), Some(host));
        }
        for list in ["", "(null)", "gpu[", "gpu[]", "gpu[07-", ",a", "a b"] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    #[test]
    fn each_node_has_its_number_of_tasks() {
        for (list, nodes) in [
            ("4", &[4][..]),
            ("8(x2),4", &[8, 8, 4]),
            ("1,2(x1),3(x2)", &[1, 2, 3, 3]),
            (" 2(x3) ", &[2, 2, 2]),
        ] {
            let counts = TaskCounts::parse(list).unwrap();
            let read: Vec<u64> = (0..).map_while(|node| counts.on_node(node)).collect();
            assert_eq!(read, nodes, "{list}");
        }
        for list in ["", "x", "8(", "8(x2", "8(xa)", "8,", "-1", "8 (x2)"] {
            assert_eq!(TaskCounts::parse(list), None, "{list}");
        }
        let many = TaskCounts::parse("1(x18446744073709551615),2").unwrap();
        assert_eq!(many.on_node(u64::MAX), Some(2));
    }
}
