//! A page as one HTML file: styles, script and pictures are inside, so that it needs no network.

use std::fmt::Write;

use super::page::{Align, Item, Page};
use crate::errors::CommandResult;
use crate::plot::Figure;

const STYLE: &str = include_str!("page.css");
/// Sorts a table by the column whose title is clicked.
pub const SCRIPT: &str = include_str!("sort.js");

/// A page as HTML: its heading, the answer in words, its first paragraph or fields, the figures, the rest. `command`
/// reproduces it.
///
/// # Errors
/// A figure that cannot be drawn.
pub fn html(
    page: &Page,
    summary: &str,
    figures: &[Figure],
    command: &str,
) -> CommandResult<String> {
    let mut body = String::new();
    let is_heading = |item: &Item| matches!(item, Item::Heading(_));
    let items = page.items();
    let lead = items.iter().position(|item| !is_heading(item)).map_or(0, |index| index + 1);
    for item in &items[..lead] {
        write_item(&mut body, item);
        if is_heading(item) && !summary.is_empty() {
            write_item(&mut body, &Item::Paragraph(summary.to_owned()));
        }
    }
    for Figure { kind, picture, caption } in figures {
        let (title, svg, caption) = (kind.title(), picture.svg()?, escaped(caption));
        let least = picture.readable_width();
        body.push_str(&format!(
            "<h2>{title}</h2>\n<figure>\n<div class=\"picture\" style=\"--least: {least}px\">\n{svg}\n</div>\n\
             <figcaption>{caption}</figcaption>\n</figure>\n"
        ));
    }
    items[lead..].iter().for_each(|item| write_item(&mut body, item));
    let title = items.iter().find_map(|item| match item {
        Item::Heading(text) => Some(escaped(text)),
        _ => None,
    });
    let (title, command) = (title.unwrap_or_default(), escaped(command));
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\
         <h2>Reproduce</h2>\n<pre><code>{command}</code></pre>\n</main>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    ))
}

/// The parts of a page as HTML for another page, under headings of the second level.
pub fn fragment(page: &Page) -> String {
    // The first heading of an empty body would be that of the whole page.
    let mut body = "\n".to_owned();
    page.items().iter().for_each(|item| write_item(&mut body, item));
    body
}

fn write_item(body: &mut String, item: &Item) {
    let _ = match item {
        // The first heading is that of the page.
        Item::Heading(text) if body.is_empty() => writeln!(body, "<h1>{}</h1>", escaped(text)),
        Item::Heading(text) => writeln!(body, "<h2>{}</h2>", escaped(text)),
        Item::Line(text) | Item::Paragraph(text) => writeln!(body, "<p>{}</p>", escaped(text)),
        Item::Fields(fields) => {
            let row = |(name, value): &(String, String)| {
                format!("<dt>{}</dt><dd>{}</dd>\n", escaped(name), escaped(value))
            };
            writeln!(body, "<dl>\n{}</dl>", fields.iter().map(row).collect::<String>())
        }
        Item::Table { columns, rows } => write_table(body, columns, rows),
    };
}

fn write_table(
    body: &mut String,
    columns: &[(String, Align)],
    rows: &[Vec<String>],
) -> std::fmt::Result {
    let class = |align: Align| if align == Align::Right { " class=\"number\"" } else { "" };
    let title = |(title, align): &(String, Align)| {
        format!("<th{}><button>{}</button></th>", class(*align), escaped(title))
    };
    let cell = |(text, (_, align)): (&String, &(String, Align))| {
        format!("<td{}>{}</td>", class(*align), escaped(text))
    };
    writeln!(body, "<div class=\"table\"><table>\n<thead><tr>")?;
    writeln!(body, "{}</tr></thead>\n<tbody>", columns.iter().map(title).collect::<String>())?;
    for row in rows {
        writeln!(body, "<tr>{}</tr>", row.iter().zip(columns).map(cell).collect::<String>())?;
    }
    writeln!(body, "</tbody>\n</table></div>")
}

/// A text with the characters that HTML reserves replaced.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_become_markup() {
        let mut page = Page::default();
        page.heading("<script>alert(1)</script> & \"more\"");
        page.fields(&[("a<b", "c>d".to_owned())]);
        page.table(&[("<i>", Align::Left)], &[vec!["</table>".to_owned()]]);
        let html = html(&page, "", &[], "narrows plan --model '<x>'").unwrap();
        for markup in ["<script>alert", "<i>", "a<b", "</table></td>", "'<x>'"] {
            assert!(!html.contains(markup), "{markup}");
        }
        assert!(
            html.contains("<h1>&lt;script&gt;alert(1)&lt;/script&gt; &amp; &quot;more&quot;</h1>")
        );
    }

    #[test]
    fn a_page_needs_no_network() {
        let html = html(&Page::default(), "", &[], "narrows plan").unwrap();
        for reference in ["http:", "https:", "src=", "href=", "@import", "url("] {
            assert!(!html.contains(reference), "{reference}");
        }
    }
}
