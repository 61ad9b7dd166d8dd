//! Weights in the files of other training codes.
//!
//! Weights are read from and written to safetensors files under the names of a [`WeightFormat`]. As in
//! checkpoints, tensors are whole: an import can be loaded under every plan of the model.
//!
//! | file | contents |
//! |---|---|
//! | `format` | the formats, and how files are recognised |
//! | `layout` | the parameters that lie in a tensor of a file |
//! | `names` | names of tensors, by format |
//! | `boost` | the fused tensors of BOOST and Nanotron |
//! | `fused` | the fused tensors of Phi-3 and InternLM2 |
//! | `safetensors_file` | one file: its header, and its tensors in f32 |
//! | `source` | a file, a folder with an index, or a Nanotron checkpoint as one set of tensors |
//! | `nanotron_folder` | the files of a Nanotron checkpoint, and the slices of sharded tensors |
//! | `import`, `export` | both directions |
//! | `fold`, `factor` | products of factor pairs, and factor pairs of dense matrices |
//!
//! Messages name the file and the tensor, and report every defect of a file at once.

mod boost;
mod error;
mod export;
mod factor;
mod fold;
mod format;
mod fused;
mod import;
mod layout;
mod names;
mod nanotron_folder;
mod safetensors_file;
mod source;

pub use error::WeightsError;
pub use export::write_weights;
pub use factor::{FactoredLinear, FactoredModel, RankChoice, factor_weights};
pub use fold::fold_weights;
pub use format::WeightFormat;
pub use import::{ImportedWeights, import_weights};
