//! Tests of models, plans and the check. One program, which is linked once and runs its tests on all cores.

mod check;
mod models;
mod models_hugging_face;
mod models_properties;
mod models_refusals;
mod mutations;
mod plan_refusals;
mod published;
mod rope;
