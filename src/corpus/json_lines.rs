//! JSON lines: one object per line, of which one field is the text of a document.

use std::io::{BufRead, BufReader, Read};

use serde_json::{Map, Value};

use narrows_plan::json;

use crate::errors::{CommandResult, Failure, Problem};

/// Longest line; a device such as `/dev/zero` would never end one.
const LINE_BYTES_MAX: u64 = 256 << 20;

/// Reads the texts of a file.
pub struct JsonLines {
    name: String,
    field: String,
    reader: BufReader<Box<dyn Read>>,
    line: String,
    number: u64,
}

impl JsonLines {
    /// The texts in `field` of each line. `name` is the file in messages.
    pub fn new(name: String, field: String, reader: BufReader<Box<dyn Read>>) -> JsonLines {
        JsonLines { name, field, reader, line: String::new(), number: 0 }
    }

    /// The next text; `None` at the end. Empty lines are skipped.
    ///
    /// # Errors
    /// A line that cannot be read, is no JSON object, or has no text in the field.
    pub fn next_text(&mut self) -> CommandResult<Option<String>> {
        loop {
            self.line.clear();
            self.number += 1;
            let read = self.reader.by_ref().take(LINE_BYTES_MAX + 1).read_line(&mut self.line);
            match read.map_err(|error| self.failure(format!("cannot be read: {error}")))? as u64 {
                0 => return Ok(None),
                read if read > LINE_BYTES_MAX => {
                    return Err(self.failure("is longer than 256 MiB".into()));
                }
                _ => {}
            }
            if !self.text_of_line().trim().is_empty() {
                return self.text().map(Some);
            }
        }
    }

    /// The line, without the byte order mark that the file may begin with.
    fn text_of_line(&self) -> &str {
        match self.number {
            1 => json::without_byte_order_mark(&self.line),
            _ => &self.line,
        }
    }

    fn text(&self) -> CommandResult<String> {
        let line = self.text_of_line();
        let fields: Map<String, Value> = serde_json::from_str(line).map_err(|error| {
            let mut failure = self.failure(format!(
                "is not a JSON object: {}",
                json::defect_of_line(&error).problem.trim_start_matches("is not JSON: ")
            ));
            // The file is one array, or one object over several lines.
            if line.trim_start().starts_with('[') || error.is_eof() {
                let hint = "one object per line, as `jq -c '.[]'` writes those of an array";
                failure.problems.iter_mut().for_each(|problem| problem.hints.push(hint.into()));
            }
            failure
        })?;
        match fields.get(&self.field) {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(_) => Err(self.failure(format!("`{}` is not a string", self.field))),
            None => {
                let texts = fields.iter().filter(|(_, value)| value.is_string());
                let names: Vec<&str> = texts.map(|(name, _)| name.as_str()).collect();
                let mut failure = self.failure(format!("has no field `{}`", self.field));
                for problem in failure.problems.iter_mut().filter(|_| !names.is_empty()) {
                    problem.hints.push(format!("--text-field {}", names.join(" or ")));
                }
                Err(failure)
            }
        }
    }

    fn failure(&self, message: String) -> Failure {
        let line = format!("line {}", self.number);
        Failure::input(Problem::new(&self.name, message).field(line))
    }
}

/// Whether the beginning of a text is that of JSON lines: an object with a text in a field, and the end of its line.
pub fn looks_like_json_lines(beginning: &[u8]) -> bool {
    let beginning = beginning.strip_prefix("\u{feff}".as_bytes()).unwrap_or(beginning);
    let line = beginning.split(|byte| *byte == b'\n').find(|line| !line.trim_ascii().is_empty());
    let object = line.and_then(|line| serde_json::from_slice::<Map<String, Value>>(line).ok());
    object.is_some_and(|fields| fields.values().any(Value::is_string))
}
