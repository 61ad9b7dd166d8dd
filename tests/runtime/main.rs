//! Planned programs on the CPU: under every plan a model computes the same function of the tokens.

mod gradients;
mod loss_curves;
mod miniatures;
mod small_models;
mod traffic;
