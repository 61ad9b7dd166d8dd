//! Trace files: events in the JSON format of Perfetto and chrome://tracing.

use serde::Serialize;
use serde_json::{Value, json};

use crate::errors::CommandResult;
use crate::output;

/// An event, with the field names of the format.
#[derive(Debug, Serialize)]
pub struct TraceEvent {
    pub name: String,
    /// Kind of event: `X` has a duration, `M` is metadata.
    pub ph: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub cat: &'static str,
    pub ts: f64,
    pub dur: f64,
    pub pid: u64,
    pub tid: u64,
    pub args: Value,
}

/// Content of a trace file, to which events are appended as text.
pub struct TraceText {
    /// The document up to the last event.
    text: Vec<u8>,
    failure: Option<serde_json::Error>,
}

/// The document before its first event.
const BEGIN: &[u8] = br#"{"displayTimeUnit":"ms","traceEvents":["#;

impl TraceText {
    /// A trace without events.
    pub fn new() -> TraceText {
        TraceText { text: BEGIN.to_vec(), failure: None }
    }

    /// Appends an event.
    pub fn push(&mut self, event: &TraceEvent) {
        if self.text.len() > BEGIN.len() {
            self.text.push(b',');
        }
        let written = serde_json::to_writer(&mut self.text, event);
        self.failure = self.failure.take().or(written.err());
    }

    /// Appends events.
    pub fn extend(&mut self, events: &[TraceEvent]) {
        events.iter().for_each(|event| self.push(event));
    }

    /// Content of the trace file `name`; `extent` describes a part of a step in words.
    ///
    /// # Errors
    /// Events that cannot be serialized.
    pub fn finish(mut self, name: &str, extent: Option<&str>) -> CommandResult<Vec<u8>> {
        if let Some(failure) = self.failure {
            return Err(output::write_failure(name, &failure.into()));
        }
        self.text.push(b']');
        if let Some(extent) = extent {
            let other_data = json!({ "extent": extent });
            self.text.extend(format!(",\"otherData\":{other_data}").into_bytes());
        }
        self.text.push(b'}');
        Ok(self.text)
    }
}
