//! The number formats of the interpreter.

use std::fmt::{Debug, Display};
use std::iter::Sum;

/// f32 or f64. Sealed, because [`Matrix`](crate::Matrix) calls GEMMs of these formats only.
pub trait Float:
    num_traits::Float + num_traits::NumAssign + Sum + Debug + Display + Send + Sync + sealed::Sealed
{
    /// Rounds to this format.
    fn from_f64(value: f64) -> Self;
}

impl Float for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Float for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }
}

mod sealed {
    pub trait Sealed: 'static {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}
