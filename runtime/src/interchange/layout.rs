//! Tensors of a file, and the parameters that lie in them.

use narrows_plan::model::ParameterId;

use crate::checkpoint::{StoredParameter, transpose};
use crate::parameters::LogicalParameter;
use crate::session::ModelTensors;

/// A tensor of a file: one parameter, or several that are stacked along their rows.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FileTensor {
    pub name: String,
    /// Shape in the file, of any number of dimensions.
    pub shape: Vec<u64>,
    pub parts: Vec<TensorPart>,
}

/// A parameter in a tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorPart {
    pub parameter: LogicalParameter,
    /// Whether the file holds the transpose.
    pub transposed: bool,
}

impl FileTensor {
    /// A tensor with one parameter.
    pub fn single(stored: StoredParameter) -> FileTensor {
        let shape = stored.shape();
        let StoredParameter { parameter, name, transposed } = stored;
        FileTensor { name, shape, parts: vec![TensorPart { parameter, transposed }] }
    }

    /// Divides the elements of the tensor among its parameters.
    pub fn split(&self, elements: &[f32]) -> Vec<(ParameterId, Vec<f32>)> {
        let mut rest = elements;
        let parts = self.parts.iter().map(|TensorPart { parameter, transposed }| {
            let (part, others) = rest.split_at(parameter.elements() as usize);
            rest = others;
            let (rows, columns) = (parameter.rows as usize, parameter.columns as usize);
            let part = if *transposed { transpose(part, columns, rows) } else { part.to_vec() };
            (parameter.id, part)
        });
        parts.collect()
    }

    /// Elements of the tensor, from those of its parameters.
    pub fn join(&self, weights: &ModelTensors) -> Vec<f32> {
        let parts = self.parts.iter().flat_map(|TensorPart { parameter, transposed }| {
            let (rows, columns) = (parameter.rows as usize, parameter.columns as usize);
            let part = &weights[&parameter.id];
            if *transposed { transpose(part, rows, columns) } else { part.clone() }
        });
        parts.collect()
    }
}
