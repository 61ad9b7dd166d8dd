//! Graphs of operations on tensors of four dimensions.

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as Kind,
    cudnnDataType_t as DataType, cudnnPointwiseMode_t as Pointwise,
    cudnnReduceTensorOp_t as Reduction,
};

use super::descriptor::{CudnnError, Descriptor};
use crate::launch::ATTENTION_ALIGNMENT;

/// Sizes or strides of the dimensions: sequence, head, row, column.
pub(super) type Dimensions = [i64; 4];

/// Location of the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Storage {
    /// In memory, at the pointer of this identifier.
    Memory(i64),
    /// One value in host memory, at the pointer of this identifier.
    Scalar(i64),
    /// Nowhere: an intermediate result.
    Virtual,
}

/// Operations of a graph under construction, with the tensors between them.
#[derive(Default)]
pub(super) struct OperationGraph {
    tensors: Vec<(Descriptor, Dimensions)>,
    /// Descriptors that operations refer to.
    parts: Vec<Descriptor>,
    operations: Vec<Descriptor>,
}

/// A tensor of an [`OperationGraph`], by its index.
#[derive(Clone, Copy)]
pub(super) struct TensorId(usize);

/// Identifiers of virtual tensors follow this one.
const VIRTUAL_IDS: i64 = 1000;

/// Strides of a tensor without gaps.
pub(super) fn packed([_, heads, rows, columns]: Dimensions) -> Dimensions {
    [heads * rows * columns, rows * columns, columns, 1]
}

impl OperationGraph {
    /// Adds a tensor.
    pub fn tensor(
        &mut self,
        storage: Storage,
        dtype: DataType,
        sizes: Dimensions,
        strides: Dimensions,
    ) -> Result<TensorId, CudnnError> {
        let tensor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        let id = match storage {
            Storage::Memory(id) | Storage::Scalar(id) => id,
            Storage::Virtual => VIRTUAL_IDS + self.tensors.len() as i64,
        };
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, &[dtype])?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &sizes)?;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &strides)?;
        let alignment = ATTENTION_ALIGNMENT as i64;
        tensor.set(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[alignment])?;
        match storage {
            Storage::Memory(_) => {}
            Storage::Scalar(_) => tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[true])?,
            Storage::Virtual => tensor.set(Attribute::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[true])?,
        }
        self.tensors.push((tensor.finalize()?, sizes));
        Ok(TensorId(self.tensors.len() - 1))
    }

    /// Adds an intermediate result without gaps.
    pub fn intermediate(
        &mut self,
        dtype: DataType,
        sizes: Dimensions,
    ) -> Result<TensorId, CudnnError> {
        self.tensor(Storage::Virtual, dtype, sizes, packed(sizes))
    }

    /// Adds one value in host memory.
    pub fn scalar(&mut self, id: i64) -> Result<TensorId, CudnnError> {
        self.tensor(Storage::Scalar(id), DataType::CUDNN_DATA_FLOAT, [1; 4], [1; 4])
    }

    /// Adds `c = a·b` over rows and columns; heads of `b` may be shared by several of `a`.
    pub fn matmul(&mut self, a: TensorId, b: TensorId, c: TensorId) -> Result<(), CudnnError> {
        let matmul = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        matmul.set(Attribute::CUDNN_ATTR_MATMUL_COMP_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        self.operation(
            Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
            Some((Attribute::CUDNN_ATTR_OPERATION_MATMUL_DESC, matmul)),
            &[
                (Attribute::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a),
                (Attribute::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
                (Attribute::CUDNN_ATTR_OPERATION_MATMUL_CDESC, c),
            ],
        )
    }

    /// Adds `y = mode(x)`, `mode(x, b)` or `mode(x, b, t)`, and returns y, a new intermediate result in f32.
    pub fn pointwise(
        &mut self,
        mode: Pointwise,
        x: TensorId,
        others: &[TensorId],
    ) -> Result<TensorId, CudnnError> {
        let y = self.intermediate(DataType::CUDNN_DATA_FLOAT, self.tensors[x.0].1)?;
        self.pointwise_into(mode, x, others, y)?;
        Ok(y)
    }

    /// As [`OperationGraph::pointwise`], into a given y.
    pub fn pointwise_into(
        &mut self,
        mode: Pointwise,
        x: TensorId,
        others: &[TensorId],
        y: TensorId,
    ) -> Result<(), CudnnError> {
        let precision = match mode {
            Pointwise::CUDNN_POINTWISE_CMP_GE => DataType::CUDNN_DATA_BOOLEAN,
            _ => DataType::CUDNN_DATA_FLOAT,
        };
        let pointwise = pointwise_descriptor(mode, precision)?;
        self.add_pointwise(pointwise, x, others, y)
    }

    /// Adds the index of each element of `x` along a dimension, as a new intermediate result.
    pub fn index(&mut self, x: TensorId, dimension: i64) -> Result<TensorId, CudnnError> {
        let y = self.intermediate(DataType::CUDNN_DATA_INT32, self.tensors[x.0].1)?;
        let mode = Pointwise::CUDNN_POINTWISE_GEN_INDEX;
        let pointwise = pointwise_descriptor(mode, DataType::CUDNN_DATA_FLOAT)?;
        pointwise.set(Attribute::CUDNN_ATTR_POINTWISE_AXIS, &[dimension])?;
        self.add_pointwise(pointwise, x, &[], y)?;
        Ok(y)
    }

    fn add_pointwise(
        &mut self,
        pointwise: Descriptor,
        x: TensorId,
        others: &[TensorId],
        y: TensorId,
    ) -> Result<(), CudnnError> {
        let inputs = [
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Attribute::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        let mut tensors = vec![(Attribute::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x)];
        tensors.extend(inputs.into_iter().zip(others.iter().copied()));
        tensors.push((Attribute::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y));
        self.operation(
            Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
            Some((Attribute::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pointwise)),
            &tensors,
        )
    }

    /// Adds a reduction of `x` over the dimensions in which `y` has size 1 or fewer elements.
    pub fn reduce(
        &mut self,
        operator: Reduction,
        x: TensorId,
        y: TensorId,
    ) -> Result<(), CudnnError> {
        let reduction = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        reduction.set(Attribute::CUDNN_ATTR_REDUCTION_OPERATOR, &[operator])?;
        reduction.set(Attribute::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[DataType::CUDNN_DATA_FLOAT])?;
        self.operation(
            Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
            Some((Attribute::CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction)),
            &[
                (Attribute::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x),
                (Attribute::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y),
            ],
        )
    }

    /// Adds the reduction of each row of `x` to one element, and returns it.
    pub fn reduce_rows(
        &mut self,
        operator: Reduction,
        x: TensorId,
    ) -> Result<TensorId, CudnnError> {
        let [sequences, heads, rows, _] = self.tensors[x.0].1;
        let sizes = [sequences, heads, rows, 1];
        let y = self.intermediate(DataType::CUDNN_DATA_FLOAT, sizes)?;
        self.reduce(operator, x, y)?;
        Ok(y)
    }

    /// Adds the transpose of rows and columns, in bf16, as a new intermediate result. `strides` are those of `x`.
    pub fn transpose(&mut self, x: TensorId, strides: Dimensions) -> Result<TensorId, CudnnError> {
        let [sequences, heads, rows, columns] = self.tensors[x.0].1;
        let [of_sequence, of_head, of_row, of_column] = strides;
        let y = self.tensor(
            Storage::Virtual,
            DataType::CUDNN_DATA_BFLOAT16,
            [sequences, heads, columns, rows],
            [of_sequence, of_head, of_column, of_row],
        )?;
        self.operation(
            Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
            None,
            &[
                (Attribute::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x),
                (Attribute::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y),
            ],
        )?;
        Ok(y)
    }

    fn operation(
        &mut self,
        kind: Kind,
        part: Option<(Attribute, Descriptor)>,
        tensors: &[(Attribute, TensorId)],
    ) -> Result<(), CudnnError> {
        let operation = Descriptor::new(kind)?;
        if let Some((name, part)) = part {
            let part = part.finalize()?;
            operation.set_descriptors(name, &[&part])?;
            self.parts.push(part);
        }
        for (name, tensor) in tensors {
            operation.set_descriptors(*name, &[&self.tensors[tensor.0].0])?;
        }
        self.operations.push(operation.finalize()?);
        Ok(())
    }

    /// The operations in the order in which they were added.
    pub fn operations(&self) -> Vec<&Descriptor> {
        self.operations.iter().collect()
    }
}

fn pointwise_descriptor(mode: Pointwise, precision: DataType) -> Result<Descriptor, CudnnError> {
    let pointwise = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
    pointwise.set(Attribute::CUDNN_ATTR_POINTWISE_MODE, &[mode])?;
    pointwise.set(Attribute::CUDNN_ATTR_POINTWISE_MATH_PREC, &[precision])?;
    Ok(pointwise)
}
