//! Parameters of RoPE: `rope_theta`, `rope_scaling`, or `rope_parameters` with both.

use serde_json::{Map, Value};

use super::fields::{ConfigFields, excerpt};
use crate::defect::{Defect, Defects};

/// θ of LLaMA, the default.
const DEFAULT_THETA: f64 = 10_000.0;

/// θ; reports every RoPE other than plain RoPE, and different values of θ.
pub(super) fn theta(fields: &mut ConfigFields<'_>) -> f64 {
    let mut theta = fields.number("rope_theta");
    for field in ["rope_parameters", "rope_scaling"] {
        let Some(parameters) = fields.object(field) else { continue };
        let nested = plain_theta(field, parameters, &mut fields.defects);
        if let (Some(theta), Some(nested)) = (theta, nested)
            && theta != nested
        {
            let problem = format!("is {nested}, but another field has {theta}");
            let defect = Defect::new(format!("{field}.rope_theta"), problem);
            fields.defects.push(defect.hint("one of the two"));
        }
        theta = theta.or(nested);
    }
    theta.unwrap_or(DEFAULT_THETA)
}

/// θ of an object of RoPE parameters; reports parameters of other than plain RoPE.
fn plain_theta(field: &str, parameters: &Map<String, Value>, defects: &mut Defects) -> Option<f64> {
    let mut theta = None;
    for (name, value) in parameters {
        let place = format!("{field}.{name}");
        match (name.as_str(), value) {
            (_, Value::Null) => {}
            ("rope_type" | "type", Value::String(kind)) if kind == "default" => {}
            ("rope_type" | "type", _) => {
                let problem = format!("{} is not supported", excerpt(value));
                defects.push(Defect::new(place, problem).hint("\"default\""));
            }
            ("rope_theta", Value::Number(number)) => theta = number.as_f64(),
            ("rope_theta", _) => {
                let problem = format!("must be a number, not {}", excerpt(value));
                defects.push(Defect::new(place, problem));
            }
            ("factor" | "partial_rotary_factor", value) if value.as_f64() == Some(1.0) => {}
            _ => defects.push(
                Defect::new(place, "changes RoPE in a way that is not supported")
                    .hint("remove it, if the model allows it"),
            ),
        }
    }
    theta
}
