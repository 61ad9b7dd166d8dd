//! Tests of prices and profiles. One program, which is linked once and runs its tests on all cores.

mod exact_steps;
mod prices;
mod profiles;
mod ring_prices;
