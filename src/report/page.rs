//! A page: headings, fields, paragraphs and tables, as text of at most [`WIDTH`] columns or as HTML (`html`).

use std::fmt::{Display, Write};

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, ContentLineStyle, LineStyle, Table,
    TableStyle, Width,
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

/// Columns that words have at least beside numbers that are not wrapped.
const WORDS_MIN: usize = 8;

/// A document: headings, fields, paragraphs and tables.
#[derive(Default)]
pub struct Page(Vec<Item>);

/// A part of a page.
pub enum Item {
    /// The heading of what follows.
    Heading(String),
    /// A line that is not wrapped.
    Line(String),
    /// A paragraph.
    Paragraph(String),
    /// Names with values.
    Fields(Vec<(String, String)>),
    /// A table.
    Table {
        /// Titles of the columns.
        columns: Vec<(String, Align)>,
        /// Cells of each row, as many as columns.
        rows: Vec<Vec<String>>,
    },
}

/// Alignment of a table column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Alignment of words.
    Left,
    /// Alignment of numbers.
    Right,
}

impl Page {
    /// A heading.
    pub fn heading(&mut self, text: impl Display) {
        self.0.push(Item::Heading(text.to_string()));
    }

    /// A line that is not wrapped.
    pub fn line(&mut self, text: impl Display) {
        self.0.push(Item::Line(text.to_string()));
    }

    /// A paragraph.
    pub fn paragraph(&mut self, text: &str) {
        self.0.push(Item::Paragraph(text.to_owned()));
    }

    /// Names with values.
    pub fn fields<N: AsRef<str>>(&mut self, fields: &[(N, String)]) {
        let field = |(name, value): &(N, String)| (name.as_ref().to_owned(), value.clone());
        self.0.push(Item::Fields(fields.iter().map(field).collect()));
    }

    /// A table. Columns without content are omitted.
    pub fn table(&mut self, columns: &[(&str, Align)], rows: &[Vec<String>]) {
        let used: Vec<usize> = (0..columns.len())
            .filter(|&index| rows.iter().any(|row| !row[index].is_empty()))
            .collect();
        let column = |&index: &usize| (columns[index].0.to_owned(), columns[index].1);
        let cells = |row: &Vec<String>| used.iter().map(|&index| row[index].clone()).collect();
        self.0.push(Item::Table {
            columns: used.iter().map(column).collect(),
            rows: rows.iter().map(cells).collect(),
        });
    }

    /// Whether the numbers of a table fit into the page without being wrapped.
    pub fn fits(columns: &[(&str, Align)], rows: &[Vec<String>]) -> bool {
        let columns: Vec<(String, Align)> =
            columns.iter().map(|(title, align)| ((*title).to_owned(), *align)).collect();
        number_widths(&columns, rows).iter().any(Option::is_some)
    }

    /// Whether the title and each row of a table fit into a line of the page.
    pub fn fits_in_lines(columns: &[(&str, Align)], rows: &[&Vec<String>]) -> bool {
        let width = |(index, (title, _)): (usize, &(&str, Align))| {
            let cells = rows.iter().map(|row| row[index].chars().count());
            cells.chain([title.chars().count()]).max().unwrap_or(0) + 2
        };
        columns.iter().enumerate().map(width).sum::<usize>() <= WIDTH - INDENT
    }

    /// Appends another page.
    pub fn extend(&mut self, page: Page) {
        self.0.extend(page.0);
    }

    /// The parts in order.
    pub fn items(&self) -> &[Item] {
        &self.0
    }

    /// The page as text, at most [`WIDTH`] columns wide. Headings follow a blank line; the rest is indented.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for item in &self.0 {
            let lines = match item {
                Item::Heading(heading) => {
                    let blank = if text.is_empty() { "" } else { "\n" };
                    text.push_str(&format!("{blank}{HEADING}{heading}{HEADING:#}\n"));
                    continue;
                }
                Item::Line(line) => vec![format!("  {line}")],
                Item::Paragraph(paragraph) => {
                    let lines = wrapped(paragraph, WIDTH - INDENT);
                    lines.into_iter().map(|line| format!("  {line}")).collect()
                }
                Item::Fields(fields) => field_lines(fields),
                Item::Table { columns, rows } => table_lines(columns, rows),
            };
            lines.iter().for_each(|line| {
                let _ = writeln!(text, "{line}");
            });
        }
        text
    }
}

/// Names and values in two columns; values are wrapped.
fn field_lines(fields: &[(String, String)]) -> Vec<String> {
    let widest = fields.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut lines = vec![];
    for (name, value) in fields {
        let mut wrapped = wrapped(value, WIDTH - INDENT - widest - 2).into_iter();
        let first = wrapped.next().unwrap_or_default();
        lines.push(format!("  {name:<widest$}  {first}"));
        lines.extend(wrapped.map(|line| format!("  {:widest$}  {line}", "")));
    }
    lines
}

/// A table whose cells are wrapped where it would be wider than the page.
fn table_lines(columns: &[(String, Align)], rows: &[Vec<String>]) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width((WIDTH - 1) as u16);
    table.set_header(columns.iter().map(|(title, _)| title));
    for row in rows {
        table.add_row(row);
    }
    let widths = number_widths(columns, rows);
    for ((column, (_, align)), width) in table.column_iter_mut().zip(columns).zip(widths) {
        column.set_padding((0, 1));
        if *align == Align::Right {
            column.set_cell_alignment(CellAlignment::Right);
        }
        if let Some(width) = width {
            // With its padding.
            let width = u16::try_from(width + 1).unwrap_or(u16::MAX);
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(width)));
        }
    }
    table.lines().map(|line| format!(" {}", line.trim_end())).collect()
}

/// Widths of the columns of numbers, whose cells are not wrapped: those of their titles, or where the table would be wider
/// than the page, those of their titles wrapped between words. All `None` where not even these fit.
fn number_widths(columns: &[(String, Align)], rows: &[Vec<String>]) -> Vec<Option<usize>> {
    let characters = |text: &str| text.chars().count();
    let cells = |index: usize| rows.iter().map(|row| characters(&row[index])).max().unwrap_or(0);
    let word = |title: &str| title.split(' ').map(characters).max().unwrap_or(0);
    let of = |title_width: &dyn Fn(&str) -> usize| -> Vec<Option<usize>> {
        let width = |(index, (title, align)): (usize, &(String, Align))| match align {
            Align::Right => Some(cells(index).max(title_width(title))),
            Align::Left => None,
        };
        columns.iter().enumerate().map(width).collect()
    };
    let fits = |widths: &Vec<Option<usize>>| {
        let width = |(index, width): (usize, &Option<usize>)| {
            width.unwrap_or_else(|| cells(index).min(WORDS_MIN)) + 2
        };
        widths.iter().enumerate().map(width).sum::<usize>() <= WIDTH - INDENT
    };
    let candidates = [of(&characters), of(&word)];
    candidates.into_iter().find(fits).unwrap_or_else(|| vec![None; columns.len()])
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
        let mut page = Page::default();
        let columns = [("a", Align::Left), ("b", Align::Left), ("c", Align::Right)];
        page.table(&columns, &[vec!["x".into(), String::new(), "10".into()]]);
        assert!(!page.text().contains('b'));
    }

    #[test]
    fn nothing_is_wider_than_the_page() {
        let words = "many more words than fit into one cell of a table ".repeat(4);
        let mut page = Page::default();
        page.paragraph(&words);
        page.fields(&[("a field", words.clone())]);
        page.table(
            &[("a", Align::Left), ("b", Align::Right)],
            &[vec![words.clone(), "1.0 ms".into()]],
        );
        let text = page.text();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert!(text.contains("1.0 ms"));
    }
    /// Titles of numbers are wrapped before the numbers and the words beside them.
    #[test]
    fn tables_of_many_numbers_fit() {
        for (count, are_wrapped) in [(1, false), (4, false), (7, false), (12, true)] {
            let mut columns = vec![("title of numbers", Align::Right); count];
            columns.push(("words", Align::Left));
            let mut row = vec!["12.5 ms".to_owned(); count];
            row.push("T4 D8 b2 Z1".into());
            let mut page = Page::default();
            page.table(&columns, &[row]);
            let text = page.text();
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
            assert_eq!(!text.contains("12.5 ms"), are_wrapped, "{text}");
            assert!(text.contains("T4 D8 b2") || are_wrapped, "{text}");
        }
    }
}
