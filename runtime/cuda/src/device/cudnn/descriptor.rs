//! Descriptors of cuDNN's backend API.

use std::ffi::{CStr, c_void};
use std::ptr;

use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Attribute, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind, cudnnStatus_t,
};

/// A refusal of cuDNN.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{call}: {message}")]
pub(crate) struct CudnnError {
    /// The call that failed.
    pub call: String,
    /// The library's message.
    pub message: String,
}

/// Bytes of an error message, at most.
const MESSAGE_BYTES: usize = 512;

/// A result of `call` as cuDNN returns it.
pub(super) fn check(call: &str, status: cudnnStatus_t) -> Result<(), CudnnError> {
    if status == cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut text = [0_u8; MESSAGE_BYTES];
    // SAFETY: the buffer has this size.
    unsafe { sys::cudnnGetLastErrorString(text.as_mut_ptr().cast(), text.len()) };
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy();
    let message = match text.trim() {
        "" => format!("{status:?}"),
        reason => format!("{status:?}, {reason}"),
    };
    Err(CudnnError { call: call.to_owned(), message })
}

/// A value of an attribute.
pub(super) trait AttributeValue: Copy {
    /// The type that cuDNN names for it.
    const TYPE: Type;
}

macro_rules! attribute_values {
    ($($value:ty => $name:ident),* $(,)?) => {$(
        impl AttributeValue for $value {
            const TYPE: Type = Type::$name;
        }
    )*};
}

attribute_values! {
    i64 => CUDNN_TYPE_INT64,
    u8 => CUDNN_TYPE_CHAR,
    bool => CUDNN_TYPE_BOOLEAN,
    *mut c_void => CUDNN_TYPE_VOID_PTR,
    sys::cudnnHandle_t => CUDNN_TYPE_HANDLE,
    sys::cudnnDataType_t => CUDNN_TYPE_DATA_TYPE,
    sys::cudnnPointwiseMode_t => CUDNN_TYPE_POINTWISE_MODE,
    sys::cudnnReduceTensorOp_t => CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
    sys::cudnnBackendHeurMode_t => CUDNN_TYPE_HEUR_MODE,
}

/// A descriptor that is destroyed on drop.
pub(super) struct Descriptor {
    raw: sys::cudnnBackendDescriptor_t,
    kind: Kind,
}

impl Descriptor {
    pub fn new(kind: Kind) -> Result<Descriptor, CudnnError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the library is loaded, and the pointer is writable.
        let status = unsafe { sys::cudnnBackendCreateDescriptor(kind, &raw mut raw) };
        check(&format!("creating a {kind:?}"), status)?;
        Ok(Descriptor { raw, kind })
    }

    /// Sets an attribute.
    pub fn set<T: AttributeValue>(&self, name: Attribute, values: &[T]) -> Result<(), CudnnError> {
        self.set_raw(name, T::TYPE, values.len(), values.as_ptr().cast())
    }

    /// Sets an attribute to other descriptors.
    pub fn set_descriptors(
        &self,
        name: Attribute,
        values: &[&Descriptor],
    ) -> Result<(), CudnnError> {
        let raw: Vec<sys::cudnnBackendDescriptor_t> =
            values.iter().map(|descriptor| descriptor.raw).collect();
        let kind = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        self.set_raw(name, kind, raw.len(), raw.as_ptr().cast())
    }

    fn set_raw(
        &self,
        name: Attribute,
        kind: Type,
        count: usize,
        values: *const c_void,
    ) -> Result<(), CudnnError> {
        // SAFETY: the descriptor is valid, and there are that many values of this type.
        let status =
            unsafe { sys::cudnnBackendSetAttribute(self.raw, name, kind, count as i64, values) };
        check(&format!("{name:?}"), status)
    }

    /// Ends the setting of attributes.
    pub fn finalize(self) -> Result<Descriptor, CudnnError> {
        // SAFETY: the descriptor is valid.
        let status = unsafe { sys::cudnnBackendFinalize(self.raw) };
        check(&format!("finalizing a {:?}", self.kind), status)?;
        Ok(self)
    }

    /// An integer attribute.
    pub fn integer(&self, name: Attribute) -> Result<i64, CudnnError> {
        let (mut value, mut count) = (0_i64, 0_i64);
        // SAFETY: the descriptor is valid, and one integer is writable.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                self.raw,
                name,
                Type::CUDNN_TYPE_INT64,
                1,
                &raw mut count,
                (&raw mut value).cast(),
            )
        };
        check(&format!("{name:?}"), status)?;
        Ok(value)
    }

    /// At most `count` descriptors of an attribute, of this kind.
    pub fn descriptors(
        &self,
        name: Attribute,
        kind: Kind,
        count: usize,
    ) -> Result<Vec<Descriptor>, CudnnError> {
        let mut found: Vec<Descriptor> =
            (0..count).map(|_| Descriptor::new(kind)).collect::<Result<_, _>>()?;
        let mut raw: Vec<sys::cudnnBackendDescriptor_t> =
            found.iter().map(|descriptor| descriptor.raw).collect();
        let mut written = 0_i64;
        // SAFETY: the descriptor is valid, and cuDNN fills that many descriptors at most.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                self.raw,
                name,
                Type::CUDNN_TYPE_BACKEND_DESCRIPTOR,
                count as i64,
                &raw mut written,
                raw.as_mut_ptr().cast(),
            )
        };
        check(&format!("{name:?}"), status)?;
        found.truncate(usize::try_from(written).unwrap_or(0));
        Ok(found)
    }

    /// The library's own name of the descriptor.
    pub fn raw(&self) -> sys::cudnnBackendDescriptor_t {
        self.raw
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is valid, and not used afterwards.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.raw) };
    }
}
