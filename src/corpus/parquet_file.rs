//! Parquet files: one column of texts.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use indicatif::ProgressBar;
use parquet::basic::Type as PhysicalType;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;

use crate::errors::{CommandResult, Failure, Problem};
use crate::library_panic::catch_panic;

/// The library, as messages name it.
const LIBRARY: &str = "the reader of Parquet files";

/// Reads the texts of a file.
pub struct ParquetFile {
    name: String,
    field: String,
    rows: RowIter<'static>,
    row: u64,
    progress: ProgressBar,
    /// Bytes of the file per row, on average.
    bytes_per_row: f64,
}

/// The problem of a file without a column, with those that may have texts as a hint.
fn no_column(name: &str, field: &str, columns: &[Arc<Type>]) -> Problem {
    let has_texts = |column: &&Arc<Type>| {
        column.is_primitive() && column.get_physical_type() == PhysicalType::BYTE_ARRAY
    };
    let names: Vec<&str> = columns.iter().filter(has_texts).map(|column| column.name()).collect();
    match names.is_empty() {
        true => Problem::new(name, format!("has no column `{field}`, and none of texts")),
        false => Problem::new(name, format!("has no column `{field}`"))
            .hint(format!("--text-field {}", names.join(" or "))),
    }
}

impl ParquetFile {
    /// Opens a file whose column `field` has the texts.
    ///
    /// # Errors
    /// A file that cannot be read, is no Parquet file, or has no such column.
    pub fn open(path: &Path, field: &str, progress: ProgressBar) -> CommandResult<ParquetFile> {
        let name = path.display().to_string();
        let failure = |message: String| Failure::input(Problem::new(&name, message));
        let file = File::open(path).map_err(|error| failure(format!("cannot be read: {error}")))?;
        let bytes = file.metadata().map_or(0, |metadata| metadata.len());
        let reader = catch_panic(LIBRARY, || SerializedFileReader::new(file))
            .map_err(failure)?
            .map_err(|error| failure(format!("is not a Parquet file: {error}")))?;
        let metadata = reader.metadata().file_metadata();
        let root = metadata.schema_descr().root_schema_ptr();
        let column = root.get_fields().iter().find(|column| column.name() == field).cloned();
        let Some(column) = column else {
            return Err(Failure::input(no_column(&name, field, root.get_fields())));
        };
        let rows = metadata.num_rows().max(1);
        let projection = Type::group_type_builder(root.name()).with_fields(vec![column]).build();
        let rows_of_column = catch_panic(LIBRARY, || {
            projection.and_then(|projection| {
                RowIter::from_file_into(Box::new(reader)).project(Some(projection))
            })
        });
        let rows_of_column =
            rows_of_column.map_err(failure)?.map_err(|error| failure(error.to_string()))?;
        let (field, bytes_per_row) = (field.to_owned(), bytes as f64 / rows as f64);
        Ok(ParquetFile { name, field, rows: rows_of_column, row: 0, progress, bytes_per_row })
    }

    /// The next text; `None` at the end.
    ///
    /// # Errors
    /// A row that cannot be read or has no text, and a column of another type.
    pub fn next_text(&mut self) -> CommandResult<Option<String>> {
        let next = catch_panic(LIBRARY, || self.rows.next());
        self.row += 1;
        let Some(row) = next.map_err(|message| self.failure(message))? else { return Ok(None) };
        self.progress.inc(self.bytes_per_row as u64);
        let row = row.map_err(|error| self.failure(format!("cannot be read: {error}")))?;
        let column = row.get_column_iter().next().map(|(_, value)| value);
        match column {
            Some(Field::Str(text)) => Ok(Some(text.clone())),
            Some(Field::Null) | None => {
                let mut failure = self.failure(format!("`{}` is null", self.field));
                let hint = "rows without a text left out, or an empty text in them";
                failure.problems.iter_mut().for_each(|problem| problem.hints.push(hint.into()));
                Err(failure)
            }
            Some(Field::Bytes(bytes)) => match std::str::from_utf8(bytes.data()) {
                Ok(text) => Ok(Some(text.to_owned())),
                Err(_) => Err(self.failure(format!("`{}` is not UTF-8", self.field))),
            },
            Some(_) => Err(self.failure(format!("column `{}` has no texts", self.field))),
        }
    }

    fn failure(&self, message: String) -> Failure {
        Failure::input(Problem::new(&self.name, message).field(format!("row {}", self.row)))
    }
}
