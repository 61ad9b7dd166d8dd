//! RoPE of a config: `rope_theta` and `rope_scaling`, or `rope_parameters` with both.

use serde_json::{Map, Value};

use super::fields::{ConfigFields, excerpt};
use crate::defect::Defect;
use crate::model::RopeScaling;

/// θ of LLaMA, the default.
const DEFAULT_THETA: f64 = 10_000.0;

/// Parameters without effect on kinds of RoPE that do not read them.
const WITHOUT_EFFECT: [&str; 1] = ["original_max_position_embeddings"];

/// RoPE as the fields of a model file.
pub(super) struct RopeFields {
    pub theta: f64,
    /// Rotated features of a head; `None` for all.
    pub rotary_dim: Option<u64>,
    pub scaling: Option<RopeScaling>,
}

/// Lengths that scalings depend on, in tokens.
#[derive(Clone, Copy)]
struct SequenceLengths {
    /// Longest sequence of the model.
    max: u64,
    /// Longest sequence of the first training, where the config states it.
    original: Option<u64>,
}

/// One object of RoPE parameters.
struct RopeParameters {
    theta: Option<f64>,
    /// Part of the features of a head that is rotated.
    partial_factor: Option<f64>,
    scaling: Option<RopeScaling>,
}

/// Reads RoPE; reports kinds of RoPE that no class has, and fields that contradict each other.
pub(super) fn rope(max_length: u64, head_dim: u64, fields: &mut ConfigFields<'_>) -> RopeFields {
    let original = fields.size("original_max_position_embeddings");
    let lengths = SequenceLengths { max: max_length, original };
    let mut theta = fields.number("rope_theta");
    let mut partial_factor =
        ["partial_rotary_factor", "rotary_pct"].into_iter().find_map(|field| fields.number(field));
    let mut scaling = None;
    for field in ["rope_parameters", "rope_scaling"] {
        let Some(parameters) = fields.object(field) else { continue };
        let nested = ParametersReader { field, parameters, fields, known: WITHOUT_EFFECT.to_vec() }
            .read(lengths);
        for (name, nested, earlier) in [
            ("rope_theta", nested.theta, &mut theta),
            ("partial_rotary_factor", nested.partial_factor, &mut partial_factor),
        ] {
            if let (Some(nested), Some(earlier)) = (nested, *earlier)
                && nested != earlier
            {
                let problem = format!("is {nested}, but another field has {earlier}");
                let defect = Defect::new(format!("{field}.{name}"), problem);
                fields.defects.push(defect.hint("one of the two"));
            }
            *earlier = earlier.or(nested);
        }
        if scaling.is_some() && nested.scaling.is_some() && scaling != nested.scaling {
            let defect = Defect::new(field, "contradicts `rope_parameters`");
            fields.defects.push(defect.hint("one of the two"));
        }
        scaling = scaling.or(nested.scaling);
    }
    let rotary_dim = partial_factor.filter(|factor| *factor != 1.0);
    RopeFields {
        theta: theta.unwrap_or(DEFAULT_THETA),
        // Truncated, as the classes do.
        rotary_dim: rotary_dim.map(|factor| (head_dim as f64 * factor) as u64),
        scaling,
    }
}

/// Reads an object of RoPE parameters one by one.
struct ParametersReader<'a, 'b> {
    field: &'static str,
    parameters: &'a Map<String, Value>,
    fields: &'b mut ConfigFields<'a>,
    known: Vec<&'static str>,
}

impl<'a> ParametersReader<'a, '_> {
    fn read(mut self, lengths: SequenceLengths) -> RopeParameters {
        let theta = self.number("rope_theta");
        let partial_factor = self.number("partial_rotary_factor");
        let kinds = ["rope_type", "type"].map(|name| {
            let value = self.value(name)?;
            Some((name, value.as_str().map_or_else(|| excerpt(value), str::to_owned)))
        });
        let kind = kinds.iter().flatten().next();
        let scaling = kind.and_then(|(name, kind)| self.scaling(name, kind, lengths));
        self.report_unknown();
        RopeParameters { theta, partial_factor, scaling }
    }

    fn scaling(&mut self, name: &str, kind: &str, lengths: SequenceLengths) -> Option<RopeScaling> {
        match kind {
            "default" => None,
            "linear" => Some(RopeScaling::Linear { factor: self.required("factor")? }),
            "dynamic" => {
                self.required("factor")?;
                self.dynamic(lengths);
                None
            }
            "llama3" => Some(RopeScaling::Llama3 {
                factor: self.required("factor")?,
                low_freq_factor: self.required("low_freq_factor")?,
                high_freq_factor: self.required("high_freq_factor")?,
                original_length: self.original_length(lengths),
            }),
            "yarn" => self.yarn(lengths),
            // `su` is the name in early configs of Phi-3.
            "longrope" | "su" => self.long_rope(lengths),
            other => {
                let problem = format!("`{other}` is not supported");
                let hint = "\"default\", \"linear\", \"llama3\", \"yarn\" or \"longrope\"";
                self.fields.defects.push(Defect::new(self.place(name), problem).hint(hint));
                None
            }
        }
    }

    /// Dynamic scaling changes the frequencies of sequences beyond the longest one of the model, which no plan
    /// has.
    fn dynamic(&mut self, lengths: SequenceLengths) {
        let original = self.original_length(lengths);
        if original < lengths.max {
            let problem = format!(
                "changes the frequencies from {original} tokens on by the length of each sequence, \
                 which is not supported"
            );
            let hint = format!("a `max_position_embeddings` of {original}");
            self.fields.defects.push(Defect::new(self.field, problem).hint(hint));
            return;
        }
        let problem = format!(
            "is `dynamic`, which is plain RoPE up to the {original} tokens of \
             `max_position_embeddings`: no sequence here is longer"
        );
        self.fields.warnings.push(Defect::new(self.field, problem));
    }

    fn yarn(&mut self, lengths: SequenceLengths) -> Option<RopeScaling> {
        let factor = self.required("factor")?;
        let (scale, all) = (self.number("mscale"), self.number("mscale_all_dim"));
        let attention_factor = self.number("attention_factor").unwrap_or(match (scale, all) {
            (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, all)
            }
            _ => yarn_attention_factor(factor, 1.0),
        });
        if self.value("truncate").is_some_and(|value| value != &Value::Bool(true)) {
            let problem = "must be true: transitions between pairs are not supported";
            self.fields.defects.push(Defect::new(self.place("truncate"), problem));
        }
        Some(RopeScaling::Yarn {
            factor,
            beta_fast: self.number("beta_fast").unwrap_or(32.0),
            beta_slow: self.number("beta_slow").unwrap_or(1.0),
            attention_factor,
            original_length: self.original_length(lengths),
        })
    }

    fn long_rope(&mut self, lengths: SequenceLengths) -> Option<RopeScaling> {
        let original_length = self.original_length(lengths);
        let ratio = lengths.max as f64 / original_length as f64;
        let factor = self.number("factor").unwrap_or(ratio);
        let attention_factor = self.number("attention_factor").unwrap_or(match factor <= 1.0 {
            true => 1.0,
            false => (1.0 + factor.ln() / (original_length as f64).ln()).sqrt(),
        });
        let [short, long] = ["short_factor", "long_factor"].map(|name| self.numbers(name));
        Some(RopeScaling::LongRope {
            short: short?,
            long: long?,
            attention_factor,
            original_length,
        })
    }

    /// The length of the earlier training, by default the longest of the model.
    fn original_length(&mut self, lengths: SequenceLengths) -> u64 {
        let nested = self.number("original_max_position_embeddings").map(|length| length as u64);
        nested.or(lengths.original).unwrap_or(lengths.max)
    }

    fn place(&self, name: &str) -> String {
        format!("{}.{name}", self.field)
    }

    /// The value of a parameter, `None` when absent or `null`.
    fn value(&mut self, name: &'static str) -> Option<&'a Value> {
        self.known.push(name);
        self.parameters.get(name).filter(|value| !value.is_null())
    }

    /// A number; `None` when absent or, after a defect, invalid.
    fn number(&mut self, name: &'static str) -> Option<f64> {
        let value = self.value(name)?;
        let number = value.as_f64();
        if number.is_none() {
            let problem = format!("must be a number, not {}", excerpt(value));
            self.fields.defects.push(Defect::new(self.place(name), problem));
        }
        number
    }

    /// A number; `None` after a defect.
    fn required(&mut self, name: &'static str) -> Option<f64> {
        if self.value(name).is_none() {
            self.fields.defects.push(Defect::new(self.place(name), "is missing"));
        }
        self.number(name)
    }

    /// A list of numbers; `None` after a defect.
    fn numbers(&mut self, name: &'static str) -> Option<Vec<f64>> {
        let list = self.value(name).and_then(Value::as_array);
        let numbers = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        if numbers.is_none() {
            let problem = "must be a list of numbers, one for each pair of rotated features";
            self.fields.defects.push(Defect::new(self.place(name), problem));
        }
        numbers
    }

    /// Reports parameters that the kind of RoPE does not have.
    fn report_unknown(&mut self) {
        for (name, value) in self.parameters {
            let is_neutral = value.is_null() || name == "factor" && value.as_f64() == Some(1.0);
            if is_neutral || self.known.contains(&name.as_str()) {
                continue;
            }
            let problem = "changes RoPE in a way that is not supported";
            let defect = Defect::new(self.place(name), problem);
            self.fields.defects.push(defect.hint("remove it, if the model allows it"));
        }
    }
}

/// YaRN's factor of rotated features.
fn yarn_attention_factor(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}
