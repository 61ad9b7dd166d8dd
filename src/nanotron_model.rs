//! Models in the YAML that Nanotron and BOOST train from: `model.model_config`, as a Hugging Face config.

use narrows_plan::strategy::NormRule;
use narrows_plan::{Defect, Defects};
use serde_json::{Map, Value, json};

use crate::yaml;

/// The model of a YAML file.
#[derive(Debug)]
pub struct NanotronModel {
    /// The fields of a Hugging Face config.
    pub config: Value,
    /// The norms of BOOST's `rmsnorm_type`; `None` for dense models, which leave them open.
    pub norm: Option<NormRule>,
}

/// Reads the model of a YAML file.
///
/// # Errors
/// A text that is not YAML or has no model, and low-rank models whose norms are not those of the whole hidden state.
pub fn read(text: &str) -> Result<NanotronModel, Defects> {
    let document = yaml::read(text)?;
    let model = &document["model"];
    let Some(config) = model["model_config"].as_object() else {
        let problem = "is missing: the file is not a configuration of Nanotron";
        return Err(Defect::new("model.model_config", problem).into());
    };
    let mut config = config.clone();
    let is_low_rank = config.get("is_cola_llama_config") == Some(&Value::Bool(true));
    // Nanotron draws initial weights by `init_method`; BOOST's classes have constants of their own.
    if let (false, Some(std)) = (is_low_rank, model["init_method"]["std"].as_f64()) {
        config.insert("initializer_range".into(), json!(std));
    }
    let norm = match is_low_rank {
        true => Some(norm(&mut config, &document["parallelism"]["tp"])?),
        false => None,
    };
    pad_vocabulary(&mut config, &model["make_vocab_size_divisible_by"]);
    Ok(NanotronModel { config: Value::Object(config), norm })
}

/// Takes the norms of BOOST's classes out of a config. Its default normalises on each device the features that it has.
fn norm(config: &mut Map<String, Value>, tensor: &Value) -> Result<NormRule, Defect> {
    let given = config.remove("rmsnorm_type").unwrap_or(Value::Null);
    let place = "model.model_config.rmsnorm_type";
    match given.as_str() {
        Some("sync") => Ok(NormRule::Sync),
        Some("online") => Ok(NormRule::Online),
        _ if tensor.as_u64() == Some(1) => Ok(NormRule::Auto),
        Some("triton") | None if given.is_null() || given == "triton" => {
            let what =
                if given.is_null() { "is missing, and the default" } else { "is `triton`, which" };
            let problem = format!(
                "{what} normalises the features of each device alone: with {tensor} devices along the tensor axis that \
                 is another function than RMSNorm"
            );
            Err(Defect::new(place, problem).hint("rmsnorm_type: sync, or online"))
        }
        _ => {
            Err(Defect::new(place, format!("{given} is not a norm of BOOST"))
                .hint("sync or online"))
        }
    }
}

/// Rounds the vocabulary up, as Nanotron does on one device of the tensor axis.
fn pad_vocabulary(config: &mut Map<String, Value>, divisor: &Value) {
    let vocab = config.get("vocab_size").and_then(Value::as_u64);
    let divisor = divisor.as_u64().filter(|divisor| *divisor > 0);
    if let (Some(vocab), Some(divisor)) = (vocab, divisor)
        && let Some(padded) = vocab.checked_next_multiple_of(divisor)
    {
        config.insert("vocab_size".into(), json!(padded));
    }
}
