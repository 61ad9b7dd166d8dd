//! The weights of a Nanotron checkpoint: a file for each tensor, or for each shard of one.
//!
//! The file of `model.decoder.0.pp_block.attn.o_proj.weight` is
//! `model/model/decoder/0/pp_block/attn/o_proj/model_weight.safetensors`, or with shards
//! `model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors`. It has one tensor, `data`. The metadata of a
//! shard have the whole shape as `(384, 64)`, and pairs of slices such as
//! `0,64,None|None,None,None#64,128,None|None,None,None`: those of the shard, and those of the whole.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::error::WeightsError;

/// Name of the tensor in each file.
pub(super) const TENSOR: &str = "data";

/// Part of a shard, and its place in the whole tensor: a range for each dimension.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SlicePair {
    pub local: Vec<Range<usize>>,
    pub global: Vec<Range<usize>>,
}

/// Path of a tensor that is not sharded, within the folder of a checkpoint.
pub(super) fn file_of(tensor: &str) -> PathBuf {
    let mut parts: Vec<&str> = tensor.split('.').collect();
    let last = parts.pop().unwrap_or_default();
    let folder: PathBuf = ["model"].into_iter().chain(parts).collect();
    folder.join(format!("model_{last}.safetensors"))
}

/// The files of all tensors below the folder `model` of a checkpoint: names of tensors, with their files.
pub(super) fn list(folder: &Path) -> Result<Vec<(String, PathBuf)>, WeightsError> {
    let mut files = vec![];
    walk(folder, "", &mut files)?;
    files.sort();
    Ok(files)
}

fn walk(
    folder: &Path,
    prefix: &str,
    files: &mut Vec<(String, PathBuf)>,
) -> Result<(), WeightsError> {
    for entry in fs::read_dir(folder).map_err(WeightsError::io(folder, "listed"))? {
        let path = entry.map_err(WeightsError::io(folder, "listed"))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            walk(&path, &format!("{prefix}{name}."), files)?;
        } else if let Some(name) = tensor_name(&name) {
            files.push((format!("{prefix}{name}"), path.clone()));
        }
    }
    Ok(())
}

/// Last part of a tensor's name from the name of its file: `weight` for `model_weight.safetensors`.
fn tensor_name(file: &str) -> Option<&str> {
    let name = file.strip_prefix("model_")?.strip_suffix(".safetensors")?;
    Some(name.split_once("_pp-rank-").map_or(name, |(name, _)| name))
}

/// Shape of the whole tensor and the slices of a shard; `None` for the file of a whole tensor.
pub(super) fn shard_of(metadata: &Metadata) -> Option<(Vec<u64>, Vec<SlicePair>)> {
    let fields = metadata.metadata().as_ref()?;
    let shape = fields.get("unsharded_shape")?.trim_matches(['(', ')']).split(',');
    let shape = shape.map(str::trim).filter(|size| !size.is_empty());
    let shape: Vec<u64> = shape.map(|size| size.parse().ok()).collect::<Option<_>>()?;
    let local_shape = &metadata.info(TENSOR)?.shape;
    let pairs = fields.get("local_global_slices_pairs")?.split(';').map(|pair| {
        let (local, global) = pair.split_once('#')?;
        let whole: Vec<usize> = shape.iter().map(|size| *size as usize).collect();
        Some(SlicePair { local: ranges(local, local_shape)?, global: ranges(global, &whole)? })
    });
    let pairs = pairs.collect::<Option<_>>()?;
    Some((shape, pairs))
}

/// Parses slices such as `0,64,None|None,None,None`; a slice with a step is `None`.
fn ranges(text: &str, shape: &[usize]) -> Option<Vec<Range<usize>>> {
    let slices: Vec<&str> = text.split('|').collect();
    if slices.len() > shape.len() {
        return None;
    }
    let range = |(dim, size): (usize, &usize)| {
        let bounds = slices.get(dim).map_or("None,None,None", |slice| *slice);
        let mut bounds = bounds.split(',').map(|bound| match bound {
            "None" => Some(None),
            number => number.parse().ok().map(Some),
        });
        let (start, end, step) = (bounds.next()??, bounds.next()??, bounds.next()??);
        let range = start.unwrap_or(0)..end.unwrap_or(*size);
        (range.start <= range.end && range.end <= *size && step.unwrap_or(1) == 1).then_some(range)
    };
    shape.iter().enumerate().map(range).collect()
}

impl SlicePair {
    /// Copies the slice of a shard to its place in the whole tensor, and returns the number of elements;
    /// `None` where the slices have different sizes.
    pub fn copy(&self, shard: (&[f32], &[usize]), whole: (&mut [f32], &[usize])) -> Option<usize> {
        let sizes = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).collect::<Vec<_>>();
        let (local, global) = (sizes(&self.local), sizes(&self.global));
        if local != global || local.is_empty() {
            return None;
        }
        let offset = |ranges: &[Range<usize>], shape: &[usize], index: &[usize]| {
            let dims = ranges.iter().zip(shape).zip(index);
            dims.fold(0, |offset, ((range, size), index)| offset * size + range.start + index)
        };
        let (last, outer) = local.split_last()?;
        let runs: usize = outer.iter().product();
        for run in 0..runs {
            let mut index = vec![0; local.len()];
            let mut rest = run;
            for (index, size) in index.iter_mut().zip(&local).take(outer.len()).rev() {
                (*index, rest) = (rest % size, rest / size);
            }
            let from = offset(&self.local, shard.1, &index);
            let to = offset(&self.global, whole.1, &index);
            whole.0[to..to + last].copy_from_slice(&shard.0[from..from + last]);
        }
        Some(runs * last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_after_their_tensors() {
        let name = "model.decoder.0.pp_block.attn.o_proj.weight";
        let path = "model/model/decoder/0/pp_block/attn/o_proj/model_weight.safetensors";
        assert_eq!(file_of(name), Path::new(path));
        for (file, tensor) in [
            ("model_weight.safetensors", Some("weight")),
            ("model_weight_pp-rank-0-of-1_tp-rank-1-of-4.safetensors", Some("weight")),
            ("optimizer_state.safetensors", None),
            ("model_config.json", None),
        ] {
            assert_eq!(tensor_name(file), tensor, "{file}");
        }
    }

    #[test]
    fn slices_without_a_step_within_the_shape_are_parsed() {
        for (text, expected) in [
            ("0,2,None|None,None,None", Some(vec![0..2, 0..3])),
            ("1,4,1", Some(vec![1..4, 0..3])),
            ("0,4,2", None),
            ("0,5,None", None),
            ("0,1,None|0,1,None|0,1,None", None),
            ("a,b,c", None),
        ] {
            assert_eq!(ranges(text, &[4, 3]), expected, "{text}");
        }
    }
}
