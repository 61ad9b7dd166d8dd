//! The numbers of a model: one matrix for every logical parameter.

use std::collections::BTreeMap;

use narrows_plan::model::Model;

use narrows_runtime::{LogicalParameter, logical_parameters};

use super::{Float, Matrix, ReferenceError};

/// A matrix for each of a model's logical parameters, by the names of
/// [`logical_parameters`]: weights, or gradients, or moments. Scales and biases have one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters<T> {
    matrices: BTreeMap<String, Matrix<T>>,
}

impl<T: Float> Parameters<T> {
    /// What the weights of a model are before its first step, in a run with this seed.
    pub fn initial(model: &Model, seed: u64) -> Self {
        Self::from_fn(model, |parameter| {
            let initial = parameter.initial_value(seed);
            move |row, column| T::of(initial(row as u64, column as u64))
        })
    }

    /// Zeros in the shapes of a model's parameters.
    pub fn zeros(model: &Model) -> Self {
        Self::from_fn(model, |_| |_, _| T::zero())
    }

    /// Every parameter from a function of its row and column.
    pub fn from_fn<F: FnMut(usize, usize) -> T>(
        model: &Model,
        mut of: impl FnMut(&LogicalParameter) -> F,
    ) -> Self {
        let matrices = logical_parameters(model)
            .into_iter()
            .map(|parameter| {
                let (rows, columns) = (parameter.rows as usize, parameter.columns as usize);
                let matrix = Matrix::from_fn(rows, columns, of(&parameter));
                (parameter.name, matrix)
            })
            .collect();
        Parameters { matrices }
    }

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&Matrix<T>> {
        self.matrices.get(name)
    }

    /// The parameter of this name, to change.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Matrix<T>> {
        self.matrices.get_mut(name)
    }

    /// Every name with its matrix, in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Matrix<T>)> {
        self.matrices.iter().map(|(name, matrix)| (name.as_str(), matrix))
    }

    /// The Euclidean norm of all of them together.
    pub fn norm(&self) -> T {
        let squares = self.matrices.values().flat_map(|matrix| matrix.elements());
        squares.map(|x| *x * *x).sum::<T>().sqrt()
    }

    /// Refuses what does not have the names and shapes of the model.
    pub(super) fn check(&self, model: &Model) -> Result<(), ReferenceError> {
        let expected = logical_parameters(model);
        for parameter in &expected {
            let name = || parameter.name.clone();
            let found = self
                .get(&parameter.name)
                .ok_or_else(|| ReferenceError::MissingParameter { name: name() })?;
            let found = (found.rows(), found.columns());
            let expected = (parameter.rows as usize, parameter.columns as usize);
            if found != expected {
                return Err(ReferenceError::ShapeMismatch { name: name(), found, expected });
            }
        }
        let known = |name: &str| expected.iter().any(|parameter| parameter.name == name);
        match self.matrices.keys().find(|name| !known(name)) {
            Some(name) => Err(ReferenceError::UnknownParameter { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// A parameter that [`check`](Self::check) has found there.
    pub(super) fn of(&self, name: &str) -> &Matrix<T> {
        self.get(name).unwrap_or_else(|| unreachable!("{name} was checked to be there"))
    }

    /// Adds to a parameter's gradient.
    pub(super) fn add(&mut self, name: &str, gradient: &Matrix<T>) {
        match self.get_mut(name) {
            Some(sum) => sum.add(gradient),
            None => unreachable!("{name} was checked to be there"),
        }
    }
}

impl<T> FromIterator<(String, Matrix<T>)> for Parameters<T> {
    fn from_iter<I: IntoIterator<Item = (String, Matrix<T>)>>(matrices: I) -> Self {
        Parameters { matrices: matrices.into_iter().collect() }
    }
}
