//! A page: headings, fields, paragraphs and tables, as text of at most [`WIDTH`] columns or as HTML (`html`).

use std::fmt::{Display, Write};

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, ContentLineStyle, LineStyle, Table,
    TableStyle, Width,
};

use narrows_plan::{Bytes, Seconds, printable};

use crate::errors::style::HEADING;
use crate::unit::{CommonUnit, Unit};

/// Columns separated by two blanks, a line under the header, no borders.
const STYLE: TableStyle = TableStyle::new()
    .header_lines(ContentLineStyle::new(' ', ' ', ' '))
    .header_separator(LineStyle::new(' ', '─', ' ', ' '))
    .content_lines(ContentLineStyle::new(' ', ' ', ' '));

/// Columns of a page.
pub const WIDTH: usize = 80;

/// Blanks before everything but headings.
const INDENT: usize = 2;

/// Columns that words have at least beside numbers that are not wrapped; a longer word of at most the second number of columns
/// is not broken either.
const WORDS_MIN: [usize; 2] = [8, 24];

/// A document: headings, fields, paragraphs and tables.
#[derive(Default)]
pub struct Page(Vec<Item>);

/// A part of a page.
pub enum Item {
    /// The heading of what follows.
    Heading(String),
    /// A line that is wrapped only where it is wider than the page.
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

/// A cell of a table.
#[derive(Clone, Debug)]
pub enum Cell {
    /// A text.
    Text(String),
    /// A quantity. Those of a column have one unit.
    Quantity(Unit, f64),
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}

impl From<Seconds> for Cell {
    fn from(seconds: Seconds) -> Cell {
        Cell::Quantity(Unit::Seconds, seconds.0)
    }
}

impl From<Bytes> for Cell {
    fn from(bytes: Bytes) -> Cell {
        Cell::Quantity(Unit::Bytes, bytes.as_f64())
    }
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
        self.0.push(Item::Heading(printed(text)));
    }

    /// A line that is wrapped only where it is wider than the page.
    pub fn line(&mut self, text: impl Display) {
        self.0.push(Item::Line(printed(text)));
    }

    /// A paragraph.
    pub fn paragraph(&mut self, text: &str) {
        self.0.push(Item::Paragraph(printed(text)));
    }

    /// Names with values.
    pub fn fields<N: AsRef<str>>(&mut self, fields: &[(N, String)]) {
        let field = |(name, value): &(N, String)| (printed(name.as_ref()), printed(value));
        self.0.push(Item::Fields(fields.iter().map(field).collect()));
    }

    /// A table. Columns without content are omitted.
    pub fn table<C: Clone + Into<Cell>>(&mut self, columns: &[(&str, Align)], rows: &[Vec<C>]) {
        let rows = texts(columns.len(), rows);
        let used: Vec<usize> = (0..columns.len())
            .filter(|&index| rows.iter().any(|row| !row[index].is_empty()))
            .collect();
        let column = |&index: &usize| (printed(columns[index].0), columns[index].1);
        let cells = |row: &Vec<String>| used.iter().map(|&index| printed(&row[index])).collect();
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
                    text.push_str(if text.is_empty() { "" } else { "\n" });
                    let styled = |line: &String| format!("{HEADING}{line}{HEADING:#}");
                    wrapped(heading, WIDTH).iter().map(styled).collect()
                }
                // Lines have places for their parts, unless there is no room for them.
                Item::Line(line) if line.chars().count() <= WIDTH - INDENT => {
                    vec![format!("  {line}")]
                }
                Item::Line(line) => {
                    let lines = wrapped(line, WIDTH - INDENT);
                    lines.into_iter().map(|line| format!("  {line}")).collect()
                }
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

/// A text without the control characters that names in files may have.
fn printed(text: impl Display) -> String {
    printable(&text.to_string()).into_owned()
}

/// The texts of the cells, with one unit for the quantities of a column.
pub fn texts<C: Clone + Into<Cell>>(columns: usize, rows: &[Vec<C>]) -> Vec<Vec<String>> {
    let rows: Vec<Vec<Cell>> =
        rows.iter().map(|row| row.iter().cloned().map(Into::into).collect()).collect();
    let common = |column: usize| {
        let quantities = rows.iter().filter_map(move |row| match row[column] {
            Cell::Quantity(unit, value) => Some((unit, value)),
            Cell::Text(_) => None,
        });
        let (unit, _) = quantities.clone().next()?;
        Some(unit.common(quantities.filter(|(other, _)| *other == unit).map(|(_, value)| value)))
    };
    let common: Vec<Option<CommonUnit>> = (0..columns).map(common).collect();
    let text = |(column, cell): (usize, &Cell)| match (cell, common[column]) {
        (Cell::Text(text), _) => text.clone(),
        (Cell::Quantity(unit, value), Some(common)) if common.is_of(*unit) => common.format(*value),
        (Cell::Quantity(unit, value), _) => unit.format(*value),
    };
    rows.iter().map(|row| row.iter().enumerate().map(text).collect()).collect()
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
    let words = |index: usize| {
        let words = rows.iter().flat_map(|row| row[index].split(' ')).map(characters);
        let longest = words.max().unwrap_or(0).min(WORDS_MIN[1]);
        cells(index).min(WORDS_MIN[0]).max(longest)
    };
    let word = |title: &str| title.split(' ').map(characters).max().unwrap_or(0);
    let of = |title_width: &dyn Fn(&str) -> usize| -> Vec<Option<usize>> {
        let width = |(index, (title, align)): (usize, &(String, Align))| match align {
            Align::Right => Some(cells(index).max(title_width(title))),
            Align::Left => None,
        };
        columns.iter().enumerate().map(width).collect()
    };
    let fits = |widths: &Vec<Option<usize>>| {
        let width =
            |(index, width): (usize, &Option<usize>)| width.unwrap_or_else(|| words(index)) + 2;
        widths.iter().enumerate().map(width).sum::<usize>() <= WIDTH - INDENT
    };
    let candidates = [of(&characters), of(&word)];
    candidates.into_iter().find(fits).unwrap_or_else(|| vec![None; columns.len()])
}

/// Wraps a text into lines of at most `width` columns, between words; a longer word is broken.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![];
    let mut line = String::new();
    let words = text.split_whitespace().flat_map(|word| {
        let characters: Vec<char> = word.chars().collect();
        let parts = characters.chunks(width.max(1)).map(|part| part.iter().collect::<String>());
        parts.collect::<Vec<_>>()
    });
    for word in words {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&word);
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_change_the_display() {
        let mut page = Page::default();
        let name = "a\u{202e}b\u{1b}[31m";
        page.line(name);
        page.paragraph(name);
        page.fields(&[("name", name.to_owned())]);
        page.table(&[("name", Align::Left)], &[vec![name.to_owned()]]);
        let text = page.text();
        assert_eq!(text.matches("a\\u{202e}b\\u{1b}[31m").count(), 4, "{text}");
        assert!(!text.contains(['\u{202e}', '\u{1b}']), "{text}");
    }

    #[test]
    fn columns_without_content_are_left_out() {
        let mut page = Page::default();
        let columns = [("a", Align::Left), ("b", Align::Left), ("c", Align::Right)];
        page.table(&columns, &[vec!["x".into(), String::new(), "10".into()]]);
        assert!(!page.text().contains('b'));
    }

    #[test]
    fn quantities_of_a_column_have_one_unit() {
        let mut page = Page::default();
        let columns = [("a", Align::Left), ("b", Align::Right), ("c", Align::Right)];
        let row = |name: &str, time: f64, bytes: u64| -> Vec<Cell> {
            vec![name.to_owned().into(), Seconds(time).into(), Bytes(bytes).into()]
        };
        page.table(&columns, &[row("x", 1.69, 3 << 30), row("y", 0.0179, 5 << 20)]);
        let text = page.text();
        for part in ["1.690 s", "0.018 s", "3.000 GiB", "0.005 GiB"] {
            assert!(text.contains(part), "{text}");
        }
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
        let name = "a-long-name-".repeat(10);
        page.heading(format!("{name} on 4 devices"));
        page.line(format!("{name}: proven"));
        page.fields(&[("model", name.clone())]);
        let text = page.text();
        let width = |line: &str| anstream::adapter::strip_str(line).to_string().chars().count();
        assert!(text.lines().all(|line| width(line) <= WIDTH), "{text}");
        assert!(text.contains("1.0 ms"));
    }

    #[test]
    fn words_beside_many_numbers_are_not_broken() {
        let columns =
            [("", Align::Left), ("A", Align::Right), ("B", Align::Right), ("C", Align::Right)];
        let mut page = Page::default();
        let wide = "1234567890123456";
        page.table(
            &columns,
            &[["exposed reduce-scatter", wide, wide, wide].map(str::to_owned).to_vec()],
        );
        let text = page.text();
        assert!(["exposed", "reduce-scatter"].iter().all(|word| text.contains(word)), "{text}");
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
