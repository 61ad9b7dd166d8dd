//! Values of a sweep as they are typed: `4,8,16`, `8..64+8` and `8..512*2`, also mixed and with units.

use narrows_planner::MemoryLimit;
use serde_json::{Number, Value};

use crate::args::memory_limit;
use crate::errors::Problem;

/// Most values of one field.
const VALUES_MAX: usize = 1_000_000;

/// Tolerance of the end of a range, relative to its step, so that `0.1..0.3+0.1` has three values.
const END_TOLERANCE: f64 = 1e-9;

/// Largest integer below which every integer is a `f64`.
const EXACT_INTEGER_MAX: f64 = 9_007_199_254_740_992.0;

/// Parses the values of a field in the order typed.
///
/// # Errors
/// An empty list, a range without values, or more than [`VALUES_MAX`] values together. The problem has no location.
pub fn parse_values(text: &str) -> Result<Vec<Value>, Problem> {
    let mut values = vec![];
    for item in text.split(',').map(str::trim) {
        values.extend(parse_item(item, VALUES_MAX - values.len())?);
    }
    Ok(values)
}

/// The middle of two positive values on a logarithmic scale: √(low·high), without an intermediate overflow.
pub fn geometric_mean([low, high]: [f64; 2]) -> f64 {
    low.sqrt() * high.sqrt()
}

/// Ratio of the ends of a gap that is written as one number.
const NARROW: f64 = 1.02;

/// A value of a gap in words, with the symbol of its unit: the middle with three digits where the gap is narrow, or its two ends.
pub fn gap_phrase([low, high]: [f64; 2], symbol: &str) -> String {
    let text = if low > 0.0 && high / low < NARROW {
        let middle = geometric_mean([low, high]);
        format!("{middle:.2e}").parse().unwrap_or(middle).to_string()
    } else {
        format!("a value between {} and {}", short(low), short(high))
    };
    format!("{text} {symbol}").trim_end().to_owned()
}

/// The values of a scalar, or of a range of at most `room` values.
fn parse_item(item: &str, room: usize) -> Result<Vec<Value>, Problem> {
    if item.is_empty() {
        return Err(problem("a value is missing").hint("values such as 4,8,16 or 8..64*2"));
    }
    match item.split_once("..") {
        Some((start, rest)) => parse_range(item, start, rest, room),
        None => Ok(vec![scalar(item)]),
    }
}

/// A JSON scalar; a word where the text is none.
pub fn scalar(text: &str) -> Value {
    match serde_json::from_str(text) {
        Ok(Value::Number(number)) => number.as_f64().map_or(Value::Number(number), |value| {
            // `1e3` and `1000.0` count things as well as `1000` does.
            self::number(value)
        }),
        Ok(value @ Value::Bool(_)) => value,
        _ => Value::String(text.to_owned()),
    }
}

/// A number in JSON: an integer where it is one, since some fields take nothing else.
pub fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < EXACT_INTEGER_MAX {
        return Value::from(value as i64);
    }
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}

fn parse_range(item: &str, start: &str, rest: &str, room: usize) -> Result<Vec<Value>, Problem> {
    let forms = "ranges have the forms 8..64+8 (in steps) and 8..512*2 (by a factor)";
    let malformed = || problem(format!("`{item}` is not a range")).hint(forms);
    let (end, operator, step) = match (rest.split_once('+'), rest.split_once('*')) {
        (Some((end, step)), None) => (end, '+', step),
        (None, Some((end, factor))) => (end, '*', factor),
        _ => return Err(malformed()),
    };
    // Sizes have the unit of the first one.
    let start = start.trim();
    let unit = match start.parse::<f64>() {
        Ok(_) => "",
        Err(_) => start.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.'),
    };
    let parse = |text: &str| text.trim().parse().ok().filter(|value: &f64| value.is_finite());
    let size = |text: &str| match unit {
        "" => parse(text),
        _ => Some(bytes(text.trim())? / bytes(&format!("1{unit}"))?),
    };
    let step = if operator == '+' { size(step) } else { parse(step) };
    let (Some(start), Some(end), Some(step)) = (size(start), size(end), step) else {
        return Err(malformed());
    };
    let (count, value): (f64, Box<dyn Fn(f64) -> f64>) = match operator {
        '+' if step > 0.0 => ((end - start) / step, Box::new(move |i| start + i * step)),
        '*' if step > 1.0 && start > 0.0 => {
            ((end / start).ln() / step.ln(), Box::new(move |i| start * step.powf(i)))
        }
        '+' => return Err(problem(format!("the step of `{item}` is not positive")).hint(forms)),
        _ => {
            let message = format!("`{item}` needs a positive start and a factor above 1");
            return Err(problem(message).hint(forms));
        }
    };
    let count = (count + END_TOLERANCE).floor();
    // Not a number where the end of a geometric range is negative.
    if count.is_nan() || count < 0.0 {
        let message = format!("`{item}` has no values: it ends before it begins");
        return Err(problem(message).hint(forms));
    }
    if count >= room as f64 {
        let message = match room {
            VALUES_MAX => format!("`{item}` has more than a million values"),
            _ => format!("with `{item}`, the field has more than a million values"),
        };
        return Err(problem(message).hint("a larger step, or a narrower range"));
    }
    let value = |index: u64| match (number(rounded(value(index as f64))), unit) {
        (number, "") => number,
        (number, unit) => Value::String(format!("{number}{unit}")),
    };
    Ok((0..=count as u64).map(value).collect())
}

/// The bytes of a size such as `8GiB`; `None` for other texts.
pub fn bytes(text: &str) -> Option<f64> {
    match memory_limit(text) {
        Ok(MemoryLimit::Bytes(bytes)) => Some(bytes.as_f64()),
        _ => None,
    }
}

/// A value with at most six digits, if it is a fraction.
pub fn short(value: f64) -> f64 {
    match value.fract() {
        0.0 => value,
        _ => format!("{value:.5e}").parse().unwrap_or(value),
    }
}

/// A value without the last bits, in which `3 * 0.1` differs from `0.3`.
fn rounded(value: f64) -> f64 {
    format!("{value:.12e}").parse().unwrap_or(value)
}

fn problem(message: impl Into<String>) -> Problem {
    Problem::new("", message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_and_ranges_are_expanded() {
        for (text, expected) in [
            ("4,8,16", json!([4, 8, 16])),
            ("8..512*2", json!([8, 16, 32, 64, 128, 256, 512])),
            ("8..30+8", json!([8, 16, 24])),
            ("0.1..0.3+0.1", json!([0.1, 0.2, 0.3])),
            ("1,2,4..16*2", json!([1, 2, 4, 8, 16])),
            ("12.5, 25 ,1e3", json!([12.5, 25, 1000])),
            ("btp,auto", json!(["btp", "auto"])),
            ("true,false", json!([true, false])),
            ("4,4", json!([4, 4])),
            ("7..7+1", json!([7])),
            ("8GiB..64GiB*2", json!(["8GiB", "16GiB", "32GiB", "64GiB"])),
            ("512MiB..2GiB*2", json!(["512MiB", "1024MiB", "2048MiB"])),
            ("0.5GiB..1.5GiB+0.5GiB", json!(["0.5GiB", "1GiB", "1.5GiB"])),
            ("1..10*3", json!([1, 3, 9])),
            ("4..6+1,5,1..2+1", json!([4, 5, 6, 5, 1, 2])),
        ] {
            assert_eq!(json!(parse_values(text).unwrap()), expected, "{text}");
        }
    }

    #[test]
    fn empty_and_endless_ranges_are_rejected() {
        for (text, expected) in [
            ("", "missing"),
            ("4,,8", "missing"),
            ("8..4+1", "ends before"),
            ("8..64", "not a range"),
            ("8..64+0", "not positive"),
            ("8..64*1", "factor above 1"),
            ("0..64*2", "positive start"),
            ("0..1e18+1", "`0..1e18+1` has more than a million"),
            ("0..999998+1,5,2..9+1", "with `2..9+1`, the field has more than a million"),
            ("1..x*2", "not a range"),
            ("1GiB..2MiB*2", "ends before"),
            ("1GiB..2GiB+1", "more than a million"),
            ("1apple..2apple*2", "not a range"),
            ("1..inf+1", "not a range"),
            ("1..-5*2", "ends before"),
        ] {
            let problem = parse_values(text).unwrap_err();
            assert!(problem.message.contains(expected), "{text}: {}", problem.message);
        }
    }

    #[test]
    fn any_text_is_parsed_or_rejected() {
        arbtest::arbtest(|u| {
            let mut text = String::new();
            for _ in 0..u.int_in_range(0..=12)? {
                text.push(*u.choose(&['1', '9', '.', ',', '*', '+', '-', 'e', 'x', ' ', '"'])?);
            }
            let _ = parse_values(&text);
            Ok(())
        })
        .budget_ms(100);
    }
}
