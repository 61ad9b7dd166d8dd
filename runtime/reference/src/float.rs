//! The two formats the interpreter computes in.

use std::fmt::{Debug, Display};
use std::iter::Sum;

/// f32 or f64, and nothing else: the products are those of these two.
pub trait Float:
    num_traits::Float + num_traits::NumAssign + Sum + Debug + Display + Send + Sync + sealed::Sealed
{
    /// The nearest number of this format.
    fn of(value: f64) -> Self;
}

impl Float for f32 {
    fn of(value: f64) -> Self {
        value as f32
    }
}

impl Float for f64 {
    fn of(value: f64) -> Self {
        value
    }
}

mod sealed {
    pub trait Sealed: 'static {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}
