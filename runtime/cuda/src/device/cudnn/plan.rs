//! Execution plans of fused attention: the engine that cuDNN's heuristic prefers, and its workspace.

use std::ffi::{CString, c_void};
use std::ptr;

use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Attribute, cudnnBackendDescriptorType_t as Kind,
    cudnnBackendHeurMode_t as Heuristic,
};

use super::attention_graph;
use super::descriptor::{CudnnError, Descriptor, check};
use crate::launch::AttentionKey;

/// Engines that are requested of the heuristic.
const ENGINES_MAX: usize = 8;

/// Maximum workspace of a plan. The reserve of a profile leaves this much to libraries.
const WORKSPACE_MAX: u64 = 1 << 30;

/// Alignment of the parts of a workspace, in bytes.
const WORKSPACE_ALIGNMENT: u64 = 256;

/// The GPU that a plan is for.
#[derive(Clone, Copy)]
pub(super) enum Target<'a> {
    /// The GPU of a handle.
    Handle(sys::cudnnHandle_t),
    /// A GPU that need not be there, by its properties.
    Properties(&'a Descriptor),
}

/// A plan for one [`AttentionKey`].
pub(super) struct AttentionPlan {
    plan: Descriptor,
    /// Tensors in the workspace, each with its offset.
    workspace_tensors: Vec<(i64, u64)>,
    /// Offset of the engine's own workspace, which is the last part.
    engine_workspace: u64,
    /// Size of the workspace.
    pub workspace_bytes: u64,
    /// Values in host memory, each with its identifier. Boxed: cuDNN reads them when the plan executes.
    scalars: Box<[(i64, f32)]>,
}

/// The pointers of one execution of a plan.
pub(crate) struct AttentionPointers(Descriptor);

// SAFETY: descriptors are plain memory, used by one thread at a time.
unsafe impl Send for AttentionPointers {}

impl AttentionPlan {
    /// The first plan of the heuristic that this GPU and this version support, within the limit of the workspace.
    ///
    /// # Errors
    /// When there is none.
    pub fn new(target: Target, key: &AttentionKey) -> Result<AttentionPlan, CudnnError> {
        let operations = attention_graph::operations(key)?;
        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        if let Target::Handle(handle) = target {
            graph.set(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[handle])?;
        }
        let ops = operations.operations();
        graph.set_descriptors(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, &ops)?;
        let graph = graph.finalize()?;

        let heuristic = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        let operation_graph = Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH;
        heuristic.set_descriptors(operation_graph, &[&graph])?;
        let mode = Heuristic::CUDNN_HEUR_MODE_A;
        heuristic.set(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?;
        if let Target::Properties(properties) = target {
            let device = Attribute::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP;
            heuristic.set_descriptors(device, &[properties])?;
        }
        let configurations = heuristic.finalize()?.descriptors(
            Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS,
            Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
            ENGINES_MAX,
        )?;
        let mut refusal = CudnnError {
            call: "selecting an engine".into(),
            message: "no engine computes this attention".into(),
        };
        for configuration in &configurations {
            match AttentionPlan::with_engine(target, key, configuration) {
                Ok(plan) if plan.workspace_bytes <= WORKSPACE_MAX => return Ok(plan),
                Ok(plan) => {
                    let bytes = plan.workspace_bytes;
                    refusal.message =
                        format!("its workspace of {bytes} bytes exceeds {WORKSPACE_MAX}");
                }
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    fn with_engine(
        target: Target,
        key: &AttentionKey,
        configuration: &Descriptor,
    ) -> Result<AttentionPlan, CudnnError> {
        let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
        let engine = Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG;
        plan.set_descriptors(engine, &[configuration])?;
        match target {
            Target::Handle(handle) => {
                plan.set(Attribute::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[handle])?
            }
            Target::Properties(properties) => {
                let device = Attribute::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP;
                plan.set_descriptors(device, &[properties])?
            }
        }
        let plan = plan.finalize()?;
        let of_engine = plan.integer(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
        let mut offset = 0;
        let workspace_tensors = attention_graph::workspace_tensors(key)
            .into_iter()
            .map(|(id, bytes)| {
                let begin = offset;
                offset = (offset + bytes).next_multiple_of(WORKSPACE_ALIGNMENT);
                (id, begin)
            })
            .collect();
        Ok(AttentionPlan {
            plan,
            workspace_tensors,
            engine_workspace: offset,
            workspace_bytes: offset + u64::try_from(of_engine).unwrap_or(0),
            scalars: attention_graph::scalars(key).into(),
        })
    }

    /// Collects the pointers of an execution: those of the operands by identifier, and the workspace.
    ///
    /// # Errors
    /// When cuDNN refuses them.
    pub fn pointers(
        &self,
        operands: impl Iterator<Item = (i64, u64)>,
        workspace: u64,
    ) -> Result<AttentionPointers, CudnnError> {
        let in_workspace =
            self.workspace_tensors.iter().map(|(id, offset)| (*id, workspace + offset));
        let scalars =
            self.scalars.iter().map(|(id, value)| (*id, ptr::from_ref(value).addr() as u64));
        let (ids, addresses): (Vec<i64>, Vec<u64>) =
            operands.chain(in_workspace).chain(scalars).unzip();
        let addresses: Vec<*mut c_void> =
            addresses.into_iter().map(|address| address as *mut c_void).collect();
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &addresses)?;
        let of_engine = (workspace + self.engine_workspace) as *mut c_void;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[of_engine])?;
        Ok(AttentionPointers(pack.finalize()?))
    }

    /// Enqueues an execution on the stream of the handle.
    pub fn execute(
        &self,
        handle: sys::cudnnHandle_t,
        pointers: &AttentionPointers,
    ) -> Result<(), CudnnError> {
        // SAFETY: the plan is finalized, and the operands lie in the arena and the workspace.
        let status = unsafe { sys::cudnnBackendExecute(handle, self.plan.raw(), pointers.0.raw()) };
        check("executing attention", status)
    }
}

/// Workspace of the plan for a GPU that need not be there, described in cuDNN's own form, in bytes.
///
/// # Errors
/// When cuDNN has no plan.
pub(super) fn workspace_without_device(
    properties: &str,
    key: &AttentionKey,
) -> Result<u64, CudnnError> {
    let device = Descriptor::new(Kind::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?;
    let text = CString::new(properties).unwrap_or_default();
    device.set(Attribute::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, text.as_bytes())?;
    let device = device.finalize()?;
    Ok(AttentionPlan::new(Target::Properties(&device), key)?.workspace_bytes)
}
