//! Counts in messages and reports.

/// A number with thousands separators: `36,000`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number with this many decimals and thousands separators: `33,195.09`.
pub fn thousands_with_decimals(number: f64, decimals: usize) -> String {
    let text = format!("{number:.decimals$}");
    let whole = text.strip_prefix('-').unwrap_or(&text);
    let whole = whole.split_once('.').map_or(whole, |(whole, _)| whole);
    match whole.parse() {
        Ok(digits) => text.replacen(whole, &thousands(digits), 1),
        // Infinity, and numbers beyond u64.
        Err(_) => text,
    }
}

/// A number with its noun: `1 stage`, `2 stages`.
pub fn plural(number: u64, noun: &str) -> String {
    plural_with(number, noun, &format!("{noun}s"))
}

/// A number with its noun, which has this plural: `1 mesh`, `2 meshes`.
pub fn plural_with(number: u64, singular: &str, plural: &str) -> String {
    let noun = if number == 1 { singular } else { plural };
    format!("{} {noun}", thousands(number))
}

/// An interval: `every step`, `every 3 steps`.
pub fn every(number: u64, noun: &str) -> String {
    match number {
        1 => format!("every {noun}"),
        _ => format!("every {}", plural(number, noun)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_singular() {
        assert_eq!(plural(0, "step"), "0 steps");
        assert_eq!(plural(1, "step"), "1 step");
        assert_eq!(plural(1_000, "warm-up step"), "1,000 warm-up steps");
        assert_eq!(
            (every(1, "step"), every(3, "step")),
            ("every step".into(), "every 3 steps".into())
        );
        assert_eq!(plural_with(1, "mesh", "meshes"), "1 mesh");
        assert_eq!(plural_with(2, "mesh", "meshes"), "2 meshes");
    }

    #[test]
    fn thousands_are_separated() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(36_000), "36,000");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(thousands_with_decimals(-33195.094, 2), "-33,195.09");
        assert_eq!(thousands_with_decimals(999.96, 1), "1,000.0");
        assert_eq!(thousands_with_decimals(2_132_030.4, 0), "2,132,030");
        assert_eq!(thousands_with_decimals(f64::INFINITY, 1), "inf");
    }
}
