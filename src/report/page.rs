//! A page of text, at most [`WIDTH`] columns wide: headings, fields, paragraphs and tables.

use std::fmt::{Display, Write};

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, ContentLineStyle, LineStyle, Table,
    TableStyle,
};

use crate::errors::style::HEADING;

/// Columns separated by two blanks, a line under the header, no borders.
const STYLE: TableStyle = TableStyle::new()
    .header_lines(ContentLineStyle::new(' ', ' ', ' '))
    .header_separator(LineStyle::new(' ', '─', ' ', ' '))
    .content_lines(ContentLineStyle::new(' ', ' ', ' '));

/// Columns of a page.
pub const WIDTH: usize = 80;

/// Blanks before everything but headings.
const INDENT: usize = 2;

/// Text under construction.
#[derive(Default)]
pub struct TextPage(String);

/// Alignment of a table column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Alignment of words.
    Left,
    /// Alignment of numbers.
    Right,
}

impl TextPage {
    /// A heading, with a blank line before it unless it is the first line.
    pub fn heading(&mut self, text: impl Display) {
        let blank = if self.0.is_empty() { "" } else { "\n" };
        let _ = writeln!(self.0, "{blank}{HEADING}{text}{HEADING:#}");
    }

    /// A line that is not wrapped.
    pub fn line(&mut self, text: impl Display) {
        let _ = writeln!(self.0, "  {text}");
    }

    /// A paragraph, wrapped at [`WIDTH`].
    pub fn paragraph(&mut self, text: &str) {
        for line in wrapped(text, WIDTH - INDENT) {
            self.line(line);
        }
    }

    /// Names with values, aligned. Long values are wrapped.
    pub fn fields<N: AsRef<str>>(&mut self, fields: &[(N, String)]) {
        let names = fields.iter().map(|(name, _)| name.as_ref());
        let widest = names.clone().map(|name| name.chars().count()).max().unwrap_or(0);
        for (name, (_, value)) in names.zip(fields) {
            let mut lines = wrapped(value, WIDTH - INDENT - widest - 2).into_iter();
            let first = lines.next().unwrap_or_default();
            let _ = writeln!(self.0, "  {name:<widest$}  {first}");
            lines.for_each(|line| self.line(format!("{:widest$}  {line}", "")));
        }
    }

    /// A table. Columns without content are omitted; cells are wrapped where the table would be wider than the page.
    pub fn table(&mut self, columns: &[(&str, Align)], rows: &[Vec<String>]) {
        let used: Vec<usize> = (0..columns.len())
            .filter(|&index| rows.iter().any(|row| !row[index].is_empty()))
            .collect();
        let mut table = Table::new();
        table.load_style(STYLE).set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width((WIDTH - 1) as u16);
        table.set_header(used.iter().map(|&index| columns[index].0));
        for row in rows {
            table.add_row(used.iter().map(|&index| row[index].as_str()));
        }
        for (column, &index) in table.column_iter_mut().zip(&used) {
            column.set_padding((0, 1));
            if columns[index].1 == Align::Right {
                column.set_cell_alignment(CellAlignment::Right);
                column.set_constraint(ColumnConstraint::ContentWidth);
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

/// Wraps a text into lines of at most `width` columns. A longer word has its own line.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![];
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_without_content_are_left_out() {
        let mut page = TextPage::default();
        let columns = [("a", Align::Left), ("b", Align::Left), ("c", Align::Right)];
        page.table(&columns, &[vec!["x".into(), String::new(), "10".into()]]);
        assert!(!page.finish().contains('b'));
    }

    #[test]
    fn nothing_is_wider_than_the_page() {
        let words = "many more words than fit into one cell of a table ".repeat(4);
        let mut page = TextPage::default();
        page.paragraph(&words);
        page.fields(&[("a field", words.clone())]);
        page.table(
            &[("a", Align::Left), ("b", Align::Right)],
            &[vec![words.clone(), "1.0 ms".into()]],
        );
        let text = page.finish();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.contains("1.0 ms"));
    }
}
