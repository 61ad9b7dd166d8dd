//! Step time against memory of a device, with the points that no other point beats in both.

use super::names::name_points;
use super::picture::{Anchor, Picture, Place};
use super::scale::Scale;
use super::{GRID, INK, PALETTE};

/// Plans by memory and step time.
#[derive(Clone, Debug)]
pub struct MemoryFront {
    /// First line of the picture.
    pub title: String,
    /// The plans.
    pub plans: Vec<FrontPoint>,
}

/// One plan.
#[derive(Clone, Debug)]
pub struct FrontPoint {
    /// Settings that distinguish the plan.
    pub name: String,
    /// Peak memory of a device in GiB.
    pub memory_gib: f64,
    /// Step time in seconds, and its 90 % interval.
    pub step_time_s: f64,
    /// Ends of the interval.
    pub interval_s: [f64; 2],
}

const SIZE: (i32, i32) = (900, 560);
const LEFT: i32 = 84;
const RIGHT: i32 = 600;
const TOP: i32 = 96;
const BOTTOM: i32 = 486;
/// Left end of the names.
const NAMES: i32 = 636;
/// Half the width of a whisker's ends, and the opacity of whiskers.
const CAP: i32 = 4;
const OPACITY: f64 = 0.55;
/// Share of the axes beyond the outermost values.
const PADDING: f64 = 0.06;

impl MemoryFront {
    /// The picture; `None` with fewer than two plans.
    pub fn picture(&self) -> Option<Picture> {
        if self.plans.len() < 2 {
            return None;
        }
        let memories = self.plans.iter().map(|plan| plan.memory_gib);
        let x = Scale::over(memories, false)?.padded(PADDING);
        let times = self
            .plans
            .iter()
            .flat_map(|plan| plan.interval_s.into_iter().chain([plan.step_time_s]));
        let y = Scale::over(times, false)?.padded(PADDING);
        let place = |memory: f64, time: f64| -> Place {
            let across = x.position(memory).clamp(0.0, 1.0) * f64::from(RIGHT - LEFT);
            let up = y.position(time).clamp(0.0, 1.0) * f64::from(BOTTOM - TOP);
            (LEFT + across.round() as i32, BOTTOM - up.round() as i32)
        };
        let front = self.front();
        let mut picture = Picture::new(SIZE);
        picture.text(&self.title, (20, 20), Anchor::Start, 19);
        let legend =
            [(PALETTE[0], "no other point has less of both"), (PALETTE[7], "other points")];
        for (index, (colour, name)) in legend.into_iter().enumerate() {
            let left = 24 + 280 * index as i32;
            picture.disc((left + 4, 61), 5, colour);
            picture.text(name, (left + 16, 55), Anchor::Start, 14);
        }
        for (tick, label) in x.labelled_ticks() {
            let across = place(tick, 1.0).0;
            picture.path([(across, TOP), (across, BOTTOM)], GRID, 1);
            picture.text(label, (across, BOTTOM + 9), Anchor::Middle, 14);
        }
        for (tick, label) in y.labelled_ticks() {
            let height = place(1.0, tick).1;
            picture.path([(LEFT, height), (RIGHT, height)], GRID, 1);
            picture.text(label, (LEFT - 8, height - 8), Anchor::End, 14);
        }
        let middle = ((LEFT + RIGHT) / 2, BOTTOM + 34);
        picture.text("peak memory of a device in GiB", middle, Anchor::Middle, 15);
        picture.vertical_text("step time in seconds", (22, (TOP + BOTTOM) / 2), 15);
        picture.text("whiskers: 90 % interval", (NAMES, BOTTOM + 34), Anchor::Start, 13);
        let point = |plan: usize| place(self.plans[plan].memory_gib, self.plans[plan].step_time_s);
        let places = front.iter().map(|&plan| point(plan));
        picture.path(places.clone(), PALETTE[0], 2);
        let others = (0..self.plans.len()).filter(|plan| !front.contains(plan));
        let others: Vec<Place> = others.map(point).collect();
        for place in &others {
            picture.disc(*place, 4, PALETTE[7]);
        }
        let mut marks: Vec<[Place; 2]> = others.into_iter().map(|place| [place; 2]).collect();
        for plan in front.iter().map(|&plan| &self.plans[plan]) {
            let ends = plan.interval_s.map(|time| place(plan.memory_gib, time));
            marks.push(ends);
            picture.faint_path(ends, PALETTE[0], 1, OPACITY);
            for (x, y) in ends {
                picture.faint_path([(x - CAP, y), (x + CAP, y)], PALETTE[0], 1, OPACITY);
            }
            picture.disc(place(plan.memory_gib, plan.step_time_s), 4, PALETTE[0]);
        }
        let named = places.zip(&front).map(|(place, &plan)| (place, self.plans[plan].name.clone()));
        name_points(&mut picture, NAMES, [TOP, BOTTOM], named.collect(), &marks);
        picture.path([(LEFT, BOTTOM), (RIGHT, BOTTOM)], INK, 1);
        Some(picture)
    }

    /// Indices of the plans that no other plan equals or beats in both, by ascending memory.
    fn front(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.plans.len()).collect();
        let key = |plan: usize| (self.plans[plan].memory_gib, self.plans[plan].step_time_s);
        order.sort_by(|&a, &b| {
            let ((memory, time), (other_memory, other_time)) = (key(a), key(b));
            memory.total_cmp(&other_memory).then(time.total_cmp(&other_time))
        });
        let mut fastest = f64::INFINITY;
        order.retain(|&plan| {
            let time = self.plans[plan].step_time_s;
            let is_faster = time < fastest;
            fastest = fastest.min(time);
            is_faster
        });
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_has_the_plans_that_no_other_beats() {
        let plan = |&(memory_gib, step_time_s): &(f64, f64)| FrontPoint {
            name: String::new(),
            memory_gib,
            step_time_s,
            interval_s: [step_time_s; 2],
        };
        let plans = [(3.0, 1.0), (1.0, 3.0), (2.0, 3.0), (2.0, 2.0), (3.0, 2.0), (1.0, 3.0)];
        let front = MemoryFront { title: String::new(), plans: plans.iter().map(plan).collect() };
        assert_eq!(front.front(), [1, 3, 0]);
        for &outside in &[2, 4, 5] {
            let (memory, time) = plans[outside];
            let beaten = |&inside: &usize| plans[inside].0 <= memory && plans[inside].1 <= time;
            assert!(front.front().iter().any(beaten), "{outside}");
        }
    }
}
