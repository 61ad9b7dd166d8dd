//! A page of text: headings, fields and tables.

use std::fmt::{Display, Write};

use comfy_table::{
    CellAlignment, ContentArrangement, ContentLineStyle, LineStyle, Table, TableStyle,
};

use crate::errors::style::HEADING;

/// Columns apart by two blanks, a line under the header, no borders.
const STYLE: TableStyle = TableStyle::new()
    .header_lines(ContentLineStyle::new(' ', ' ', ' '))
    .header_separator(LineStyle::new(' ', '─', ' ', ' '))
    .content_lines(ContentLineStyle::new(' ', ' ', ' '));

/// Characters of a line of running text.
const PARAGRAPH_WIDTH: usize = 96;

/// Text under construction.
#[derive(Default)]
pub struct TextPage(String);

/// Which way a column is aligned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

impl TextPage {
    /// A heading, a blank line before it.
    pub fn heading(&mut self, text: impl Display) {
        let blank = if self.0.is_empty() { "" } else { "\n" };
        let _ = writeln!(self.0, "{blank}{HEADING}{text}{HEADING:#}");
    }

    /// A line of running text.
    pub fn line(&mut self, text: impl Display) {
        let _ = writeln!(self.0, "  {text}");
    }

    /// Running text, wrapped.
    pub fn paragraph(&mut self, text: &str) {
        let mut line = String::new();
        for word in text.split_whitespace() {
            if !line.is_empty() && line.chars().count() + word.chars().count() >= PARAGRAPH_WIDTH {
                self.line(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        if !line.is_empty() {
            self.line(line);
        }
    }

    /// Names with values, aligned.
    pub fn fields(&mut self, fields: &[(&str, String)]) {
        let widest = fields.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        for (name, value) in fields {
            let _ = writeln!(self.0, "  {name:<widest$}  {value}");
        }
    }

    /// A table; columns in which every cell is empty are left out.
    pub fn table(&mut self, columns: &[(&str, Align)], rows: &[Vec<String>]) {
        let used: Vec<usize> = (0..columns.len())
            .filter(|&index| rows.iter().any(|row| !row[index].is_empty()))
            .collect();
        let mut table = Table::new();
        table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(used.iter().map(|&index| columns[index].0));
        for row in rows {
            table.add_row(used.iter().map(|&index| row[index].as_str()));
        }
        for (column, &index) in table.column_iter_mut().zip(&used) {
            if columns[index].1 == Align::Right {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        for line in table.lines() {
            let _ = writeln!(self.0, " {}", line.trim_end());
        }
    }

    /// The finished text.
    pub fn finish(self) -> String {
        self.0
    }
}

/// A number with its thousands apart: `36,000`.
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

/// A large count in three digits: `6.74 B`, `58.1 M`.
pub fn count(number: u64) -> String {
    let (value, unit) = match number {
        0..1_000 => return number.to_string(),
        1_000..1_000_000 => (number as f64 / 1e3, "k"),
        1_000_000..1_000_000_000 => (number as f64 / 1e6, "M"),
        _ => (number as f64 / 1e9, "B"),
    };
    let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.decimals$} {unit}")
}

/// A share in percent; from a thousand times on with an exponent.
pub fn percent(share: f64) -> String {
    percents(share * 100.0, 1)
}

/// Percents, with so many decimals where they can be read.
pub fn percents(number: f64, decimals: usize) -> String {
    if number.abs() < 1e5 { format!("{number:.decimals$} %") } else { format!("{number:.1e} %") }
}

/// The same with its sign.
pub fn signed_percents(number: f64, decimals: usize) -> String {
    let sign = if number.is_sign_negative() { "" } else { "+" };
    format!("{sign}{}", percents(number, decimals))
}

/// How far measurements lie from a price: `±38.1 %`, and beyond ±100 % the factor, `×2.4`, `×1.2e3`.
pub fn half_width(relative: f64) -> String {
    let factor = 1.0 + relative;
    match relative {
        ..=1.0 => format!("±{}", percent(relative)),
        ..99.0 => format!("×{factor:.1}"),
        _ => format!("×{factor:.1e}"),
    }
}

/// `1 stage`, `2 stages`.
pub fn plural(number: u64, noun: &str) -> String {
    let s = if number == 1 { "" } else { "s" };
    format!("{} {noun}{s}", thousands(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(36_000), "36,000");
        assert_eq!(thousands(1_234_567), "1,234,567");
        assert_eq!(count(6_738_415_616), "6.74 B");
        assert_eq!(count(58_100_000), "58.1 M");
        assert_eq!(count(999), "999");
        assert_eq!(percent(0.381), "38.1 %");
        assert_eq!((percent(1e300), percent(-1e300)), ("1.0e302 %".into(), "-1.0e302 %".into()));
        assert_eq!(signed_percents(-6.66, 1), "-6.7 %");
        assert_eq!(signed_percents(6.66, 2), "+6.66 %");
        assert_eq!(half_width(0.381), "±38.1 %");
        assert_eq!((half_width(1.4), half_width(1.2e6)), ("×2.4".into(), "×1.2e6".into()));
    }

    #[test]
    fn empty_columns_are_left_out() {
        let mut page = TextPage::default();
        let columns = [("a", Align::Left), ("b", Align::Left), ("c", Align::Right)];
        page.table(&columns, &[vec!["x".into(), String::new(), "10".into()]]);
        assert!(!page.finish().contains('b'));
    }
}
