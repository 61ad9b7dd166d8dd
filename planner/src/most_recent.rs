//! A list of few entries that keeps those used last.

/// Entries, of which those unused longest are forgotten. Lookups are linear.
pub(crate) struct MostRecent<T, const MAX: usize> {
    /// The most recently used first.
    entries: Vec<T>,
}

impl<T, const MAX: usize> Default for MostRecent<T, MAX> {
    fn default() -> MostRecent<T, MAX> {
        MostRecent { entries: vec![] }
    }
}

impl<T, const MAX: usize> MostRecent<T, MAX> {
    /// The first entry that satisfies a condition, which becomes the most recently used one.
    pub(crate) fn find(&mut self, condition: impl Fn(&T) -> bool) -> Option<&mut T> {
        let index = self.entries.iter().position(condition)?;
        self.entries[..=index].rotate_right(1);
        self.entries.first_mut()
    }

    /// As [`find`](MostRecent::find), with a new entry where none satisfies the condition.
    pub(crate) fn find_or_insert_with(
        &mut self,
        condition: impl Fn(&T) -> bool,
        new: impl FnOnce() -> T,
    ) -> &mut T {
        if self.find(condition).is_none() {
            self.entries.truncate(MAX - 1);
            self.entries.insert(0, new());
        }
        &mut self.entries[0]
    }

    /// Forgets the entries that do not satisfy a condition.
    pub(crate) fn retain(&mut self, condition: impl Fn(&T) -> bool) {
        self.entries.retain(condition);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_unused_longest_is_forgotten() {
        let mut entries: MostRecent<usize, 3> = MostRecent::default();
        for value in [0, 1, 2, 0, 3] {
            let entry = entries.find_or_insert_with(|entry| *entry == value, || value);
            assert_eq!(*entry, value);
        }
        assert_eq!(entries.entries, [3, 0, 2]);
        assert_eq!(entries.find(|entry| *entry == 2), Some(&mut 2));
        assert_eq!(entries.find(|entry| *entry == 1), None);
        assert_eq!(entries.entries, [2, 3, 0]);
    }
}
