//! The parameters of a model, one matrix each.

use std::collections::BTreeMap;

use narrows_plan::model::{Model, ParameterId};
use narrows_runtime::{LogicalParameter, logical_parameters, random_stream_name};

use super::{Float, Matrix, ReferenceError};

/// A matrix for each of the [`logical_parameters`] of a model: weights, gradients or moments. Scales and biases have one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters<T> {
    matrices: BTreeMap<ParameterId, Matrix<T>>,
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
                (parameter.id, matrix)
            })
            .collect();
        Parameters { matrices }
    }

    /// A parameter.
    pub fn get(&self, id: ParameterId) -> Option<&Matrix<T>> {
        self.matrices.get(&id)
    }

    /// A parameter, mutable.
    pub fn get_mut(&mut self, id: ParameterId) -> Option<&mut Matrix<T>> {
        self.matrices.get_mut(&id)
    }

    /// All parameters, in the alphabetical order of their stream names.
    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Matrix<T>)> {
        let mut sorted: Vec<(ParameterId, &Matrix<T>)> =
            self.matrices.iter().map(|(id, matrix)| (*id, matrix)).collect();
        sorted.sort_by_cached_key(|(id, _)| random_stream_name(*id));
        sorted.into_iter()
    }

    /// The Euclidean norm of all parameters together. The squares are added in the order of
    /// [`iter`](Self::iter), on which the rounding of the sum depends.
    pub fn norm(&self) -> T {
        let squares = self.iter().flat_map(|(_, matrix)| matrix.elements());
        squares.map(|x| *x * *x).sum::<T>().sqrt()
    }

    /// Checks that ids and shapes are those of the model.
    pub(super) fn validate(&self, model: &Model) -> Result<(), ReferenceError> {
        let expected = logical_parameters(model);
        for parameter in &expected {
            let name = || parameter.id.to_string();
            let matrix = self
                .get(parameter.id)
                .ok_or_else(|| ReferenceError::MissingParameter { name: name() })?;
            let actual = (matrix.rows(), matrix.columns());
            let expected = (parameter.rows as usize, parameter.columns as usize);
            if actual != expected {
                return Err(ReferenceError::ShapeMismatch { name: name(), actual, expected });
            }
        }
        let known = |id: ParameterId| expected.iter().any(|parameter| parameter.id == id);
        match self.matrices.keys().find(|id| !known(**id)) {
            Some(id) => Err(ReferenceError::UnknownParameter { name: id.to_string() }),
            None => Ok(()),
        }
    }

    /// A parameter that exists, as [`validate`](Self::validate) has checked.
    pub(super) fn checked(&self, id: ParameterId) -> &Matrix<T> {
        self.get(id).unwrap_or_else(|| unreachable!("{id} was validated"))
    }

    /// Adds to the gradient of a parameter.
    pub(super) fn add(&mut self, id: ParameterId, gradient: &Matrix<T>) {
        match self.get_mut(id) {
            Some(sum) => sum.add(gradient),
            None => unreachable!("{id} was validated"),
        }
    }
}

impl<T> FromIterator<(ParameterId, Matrix<T>)> for Parameters<T> {
    fn from_iter<I: IntoIterator<Item = (ParameterId, Matrix<T>)>>(matrices: I) -> Self {
        Parameters { matrices: matrices.into_iter().collect() }
    }
}
