//! Weights in the files of another training code.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use narrows_plan::Defect;
use narrows_plan::model::Model;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, TensorView};

use super::error::WeightsError;
use super::format::WeightFormat;
use super::layout::FileTensor;
use super::names::file_tensors;
use super::nanotron_folder::{self, TENSOR};
use crate::session::ModelTensors;

/// Writes the weights of a model into a folder, in f32: `model.safetensors`, or the folder `model` of a
/// Nanotron checkpoint. Returns the path of what was written.
///
/// # Errors
/// A model for which the format has no names, and files that cannot be written.
///
/// # Panics
/// When a parameter of the model has no weights.
pub fn write_weights(
    folder: &Path,
    model: &Model,
    weights: &ModelTensors,
    format: WeightFormat,
) -> Result<PathBuf, WeightsError> {
    let of_model = |defect: Defect| WeightsError::new(folder, defect);
    let tensors = file_tensors(model, format).map_err(of_model)?;
    if format == WeightFormat::Nanotron {
        for tensor in &tensors {
            let path = folder.join(nanotron_folder::file_of(&tensor.name));
            let parent = path.parent().unwrap_or(folder);
            fs::create_dir_all(parent).map_err(WeightsError::io(parent, "created"))?;
            write_file(&path, [(TENSOR, tensor)], weights)?;
        }
        return Ok(folder.join("model"));
    }
    let path = folder.join("model.safetensors");
    write_file(&path, tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)), weights)?;
    Ok(path)
}

/// Writes a file with these tensors under these names.
fn write_file<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a FileTensor)>,
    weights: &ModelTensors,
) -> Result<(), WeightsError> {
    let data = tensors.into_iter().map(|(name, tensor)| {
        let elements = tensor.join(weights);
        let bytes: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        (name, &tensor.shape, bytes)
    });
    let data: Vec<_> = data.collect();
    let views = data.iter().map(|(name, shape, bytes)| {
        let shape = shape.iter().map(|size| *size as usize).collect();
        TensorView::new(Dtype::F32, shape, bytes).map(|view| (*name, view))
    });
    let views: Vec<_> = views
        .collect::<Result<_, _>>()
        .map_err(io::Error::other)
        .map_err(WeightsError::io(path, "written"))?;
    // Hugging Face's loaders require the format.
    let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    let write = || -> io::Result<()> {
        // The file that the library makes can be read by its owner alone.
        let permissions = File::create(path)?.metadata()?.permissions();
        safetensors::serialize_to_file(views, Some(metadata), path).map_err(
            |error| match error {
                SafeTensorError::IoError(error) => error,
                error => io::Error::other(error),
            },
        )?;
        let file = File::open(path)?;
        file.set_permissions(permissions)?;
        // Some disks report only now that they are full.
        file.sync_all()
    };
    write().map_err(WeightsError::io(path, "written"))
}
