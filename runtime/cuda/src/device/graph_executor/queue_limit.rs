//! The number of items that the host enqueues ahead of the GPU.

use crate::schedule::ScheduleItem;

/// Items that the host may enqueue ahead of the GPU.
const ITEMS_AHEAD_MAX: usize = 8;

/// For each item, the item whose end the host awaits before enqueuing it: [`ITEMS_AHEAD_MAX`] items earlier, or the last
/// one before that has no bucket.
pub(super) fn awaited_items<'a>(
    items: impl Iterator<Item = &'a ScheduleItem>,
) -> Vec<Option<usize>> {
    let mut last = None;
    let in_order = items.enumerate().map(|(index, item)| {
        last = if item.is_bucket() { last } else { Some(index) };
        last
    });
    std::iter::repeat_n(None, ITEMS_AHEAD_MAX).chain(in_order).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_never_awaits_buckets() {
        let items: Vec<ScheduleItem> = (0..20)
            .map(|index| match index % 3 {
                2 => ScheduleItem::Reductions(index),
                _ => ScheduleItem::Segment(index),
            })
            .collect();
        let awaited = awaited_items(items.iter());
        assert_eq!(awaited[..ITEMS_AHEAD_MAX], [None; ITEMS_AHEAD_MAX]);
        assert_eq!(awaited[8..14], [Some(0), Some(1), Some(1), Some(3), Some(4), Some(4)]);
    }
}
