//! Writing the shards of one process, from its devices or from a copy of their tensors.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;

use narrows_plan::model::{Model, ParameterId};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::error::{CheckpointError, CheckpointFault};
use super::format::{MODEL_SHARD, OPTIMIZER_SHARD};
use super::manifest::FileEntry;
use super::names::stored_parameters;
use super::shards::{KINDS, SLICES};
use super::tensors::HashingWriter;
use crate::error::RunError;
use crate::session::{LocalSlice, Session, TensorSlice};

/// A file that this process writes, with its tensors.
pub(super) struct Shard<T> {
    name: String,
    /// Names and slices.
    tensors: Vec<(String, T)>,
}

/// A slice with its elements.
pub(super) struct CopiedSlice {
    slice: TensorSlice,
    elements: Vec<f32>,
}

/// The shards of this process, which has this rank among so many.
pub(super) fn local_shards(
    session: &Session,
    model: &Model,
    (rank, world_size): (u64, u64),
) -> Vec<Shard<LocalSlice>> {
    let names: HashMap<ParameterId, String> = stored_parameters(model)
        .into_iter()
        .map(|stored| (stored.parameter.id, stored.name))
        .collect();
    let shard = |start: &str| {
        let of_file = KINDS.iter().filter(|(_, of, _)| *of == start);
        let tensors = of_file.flat_map(|(kind, _, suffix)| {
            let names = &names;
            let slices = session.local_slices(*kind).into_iter();
            slices.map(move |slice| (format!("{}{suffix}", names[&slice.id]), slice))
        });
        let name = format!("{start}{:05}-of-{world_size:05}.safetensors", rank + 1);
        Shard { name, tensors: tensors.collect() }
    };
    let shards = [MODEL_SHARD, OPTIMIZER_SHARD].map(shard);
    shards.into_iter().filter(|shard| !shard.tensors.is_empty()).collect()
}

/// Copies the elements of all shards.
///
/// # Errors
/// When a device is lost.
pub(super) fn copy_shards(
    session: &Session,
    shards: Vec<Shard<LocalSlice>>,
) -> Result<Vec<Shard<CopiedSlice>>, RunError> {
    let copy = |(name, local): (String, LocalSlice)| {
        let elements = session.read_slice(&local)?;
        Ok((name, CopiedSlice { slice: local.slice, elements }))
    };
    let copy = |Shard { name, tensors }: Shard<LocalSlice>| {
        let tensors = tensors.into_iter().map(copy).collect::<Result<_, RunError>>()?;
        Ok(Shard { name, tensors })
    };
    shards.into_iter().map(copy).collect()
}

/// Writes the shards of a process into a folder, tensor by tensor. Errors name files of `target`, the final folder.
pub(super) fn write_local_shards(
    (folder, target): (&Path, &Path),
    session: &Session,
    shards: &[Shard<LocalSlice>],
) -> Result<BTreeMap<String, FileEntry>, CheckpointError> {
    write_shards(
        (folder, target),
        shards,
        |local| local.slice,
        |local| Ok(session.read_slice(local)?.into()),
    )
}

/// Writes copied shards, as [`write_local_shards`].
pub(super) fn write_copies(
    (folder, target): (&Path, &Path),
    shards: &[Shard<CopiedSlice>],
) -> Result<BTreeMap<String, FileEntry>, CheckpointError> {
    write_shards(
        (folder, target),
        shards,
        |copy| copy.slice,
        |copy| Ok(Cow::Borrowed(&copy.elements[..])),
    )
}

fn write_shards<T>(
    (folder, target): (&Path, &Path),
    shards: &[Shard<T>],
    slice_of: impl Fn(&T) -> TensorSlice,
    read: impl for<'a> Fn(&'a T) -> Result<Cow<'a, [f32]>, CheckpointFault>,
) -> Result<BTreeMap<String, FileEntry>, CheckpointError> {
    let write = |shard: &Shard<T>| {
        let name = &shard.name;
        let entry = write_shard(&folder.join(name), &shard.tensors, &slice_of, &read)
            .map_err(|fault| CheckpointError::new(&target.join(name), fault))?;
        Ok((name.clone(), entry))
    };
    shards.iter().map(write).collect()
}

fn write_shard<T>(
    path: &Path,
    tensors: &[(String, T)],
    slice_of: impl Fn(&T) -> TensorSlice,
    read: impl for<'a> Fn(&'a T) -> Result<Cow<'a, [f32]>, CheckpointFault>,
) -> Result<FileEntry, CheckpointFault> {
    let written = |source: io::Error| CheckpointFault::Io { action: "written", source };
    let by_name: BTreeMap<&str, TensorSlice> =
        tensors.iter().map(|(name, tensor)| (&**name, slice_of(tensor))).collect();
    let by_name = serde_json::to_string(&by_name).map_err(|error| written(error.into()))?;
    let mut start = 0;
    let infos = tensors.iter().map(|(name, tensor)| {
        let count = slice_of(tensor).count as usize;
        let data_offsets = (start, start + count * size_of::<f32>());
        start = data_offsets.1;
        (name.clone(), TensorInfo { dtype: Dtype::F32, shape: vec![count], data_offsets })
    });
    let infos = infos.collect();
    let metadata = HashMap::from([(SLICES.to_owned(), by_name)]);
    let metadata =
        Metadata::new(Some(metadata), infos).map_err(io::Error::other).map_err(written)?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| written(error.into()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = HashingWriter::create(path).map_err(written)?;
    file.write(&(header.len() as u64).to_le_bytes()).map_err(written)?;
    file.write(&header).map_err(written)?;
    for (_, tensor) in tensors {
        file.write_elements(&read(tensor)?).map_err(written)?;
    }
    file.finish().map_err(written)
}
