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
    /// Number of slices of each part. The file has the first slice of every part, then the second of every part:
    /// 1 where whole parameters follow each other.
    pub slices: u64,
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
        FileTensor { name, shape, parts: vec![TensorPart { parameter, transposed }], slices: 1 }
    }

    /// Divides the elements of the tensor among its parameters.
    pub fn split(&self, elements: &[f32]) -> Vec<(ParameterId, Vec<f32>)> {
        let mut stored = vec![vec![]; self.parts.len()];
        let mut rest = elements;
        for _ in 0..self.slices {
            for (part, stored) in self.parts.iter().zip(&mut stored) {
                let (slice, others) = rest.split_at(self.slice_elements(part));
                stored.extend_from_slice(slice);
                rest = others;
            }
        }
        let parts = self.parts.iter().zip(stored);
        let parts = parts.map(|(TensorPart { parameter, transposed }, stored)| {
            let (rows, columns) = (parameter.rows as usize, parameter.columns as usize);
            let part = if *transposed { transpose(&stored, columns, rows) } else { stored };
            (parameter.id, part)
        });
        parts.collect()
    }

    /// Elements of the tensor, from those of its parameters.
    pub fn join(&self, weights: &ModelTensors) -> Vec<f32> {
        let parts = self.parts.iter().map(|TensorPart { parameter, transposed }| {
            let (rows, columns) = (parameter.rows as usize, parameter.columns as usize);
            let part = &weights[&parameter.id];
            if *transposed { transpose(part, rows, columns) } else { part.clone() }
        });
        let stored: Vec<_> = parts.collect();
        let slices = (0..self.slices as usize).flat_map(|slice| {
            let parts = self.parts.iter().zip(&stored);
            parts.flat_map(move |(part, stored)| {
                let elements = self.slice_elements(part);
                &stored[slice * elements..][..elements]
            })
        });
        slices.copied().collect()
    }

    fn slice_elements(&self, part: &TensorPart) -> usize {
        (part.parameter.elements() / self.slices) as usize
    }
}
