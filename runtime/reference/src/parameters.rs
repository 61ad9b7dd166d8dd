//! The parameters of a model, one matrix each.

use std::collections::BTreeMap;

use narrows_plan::model::Model;
use narrows_runtime::{LogicalParameter, logical_parameters};

use super::{Float, Matrix, ReferenceError};

/// A matrix for each logical parameter of a model, under the names of [`logical_parameters`]: weights,
/// gradients or moments. Scales and biases have one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters<T> {
    matrices: BTreeMap<String, Matrix<T>>,
}

impl<T: Float> Parameters<T> {
    /// The initial weights of a model in a run with this seed.
    pub fn initial(model: &Model, seed: u64) -> Self {
        Self::from_fn(model, |parameter| {
            let initial = parameter.initial_value(seed);
            move |row, column| T::from_f64(initial(row as u64, column as u64))
        })
    }

    /// Zeros in the shapes of the parameters of a model.
    pub fn zeros(model: &Model) -> Self {
        Self::from_fn(model, |_| |_, _| T::zero())
    }

    /// Parameters from functions of row and column: `element_of(parameter)` returns the function of each.
    pub fn from_fn<F: FnMut(usize, usize) -> T>(
        model: &Model,
        mut element_of: impl FnMut(&LogicalParameter) -> F,
    ) -> Self {
        let matrices = logical_parameters(model)
            .into_iter()
            .map(|parameter| {
                let (rows, columns) = (parameter.rows as usize, parameter.columns as usize);
                let matrix = Matrix::from_fn(rows, columns, element_of(&parameter));
                (parameter.name, matrix)
            })
            .collect();
        Parameters { matrices }
    }

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&Matrix<T>> {
        self.matrices.get(name)
    }

    /// The parameter of this name, mutable.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Matrix<T>> {
        self.matrices.get_mut(name)
    }

    /// All names and matrices, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Matrix<T>)> {
        self.matrices.iter().map(|(name, matrix)| (name.as_str(), matrix))
    }

    /// The Euclidean norm of all parameters together.
    pub fn norm(&self) -> T {
        let squares = self.matrices.values().flat_map(|matrix| matrix.elements());
        squares.map(|x| *x * *x).sum::<T>().sqrt()
    }

    /// Checks that names and shapes are those of the model.
    pub(super) fn validate(&self, model: &Model) -> Result<(), ReferenceError> {
        let expected = logical_parameters(model);
        for parameter in &expected {
            let name = || parameter.name.clone();
            let matrix = self
                .get(&parameter.name)
                .ok_or_else(|| ReferenceError::MissingParameter { name: name() })?;
            let actual = (matrix.rows(), matrix.columns());
            let expected = (parameter.rows as usize, parameter.columns as usize);
            if actual != expected {
                return Err(ReferenceError::ShapeMismatch { name: name(), actual, expected });
            }
        }
        let known = |name: &str| expected.iter().any(|parameter| parameter.name == name);
        match self.matrices.keys().find(|name| !known(name)) {
            Some(name) => Err(ReferenceError::UnknownParameter { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// A parameter that exists, as [`validate`](Self::validate) has checked.
    pub(super) fn checked(&self, name: &str) -> &Matrix<T> {
        self.get(name).unwrap_or_else(|| unreachable!("{name} was validated"))
    }

    /// Adds to the gradient of a parameter.
    pub(super) fn add(&mut self, name: &str, gradient: &Matrix<T>) {
        match self.get_mut(name) {
            Some(sum) => sum.add(gradient),
            None => unreachable!("{name} was validated"),
        }
    }
}

impl<T> FromIterator<(String, Matrix<T>)> for Parameters<T> {
    fn from_iter<I: IntoIterator<Item = (String, Matrix<T>)>>(matrices: I) -> Self {
        Parameters { matrices: matrices.into_iter().collect() }
    }
}
