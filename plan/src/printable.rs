//! Texts of files and of other processes, fit to be printed.

use std::borrow::Cow;

/// Whether a character controls a terminal or the direction of text, so that other text may look different from what it is.
pub fn is_display_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A text of one or more lines with its other [display controls](is_display_control) escaped.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_escaped = |c: char| c != '\n' && is_display_control(c);
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match is_escaped(c) {
            true => escaped.extend(c.escape_default()),
            false => escaped.push(c),
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn characters_that_change_the_display_are_escaped() {
        for (text, expected) in [
            ("Grüße\n→", "Grüße\n→"),
            ("a\u{1b}[31mb\r", "a\\u{1b}[31mb\\r"),
            ("a\u{202e}b\u{2066}", "a\\u{202e}b\\u{2066}"),
        ] {
            assert_eq!(printable(text), expected);
        }
    }
}
