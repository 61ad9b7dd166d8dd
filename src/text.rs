//! Formats numbers and plans for messages and reports.

use std::fmt::Display;

pub use narrows_plan::counts::{every, plural, plural_with, thousands, thousands_with_decimals};
use narrows_plan::{ContextAttention, Mesh, PipelineSchedule, Plan, Zero};

/// Batch and sequence length of a step: `32 sequences of 4,096 tokens`.
pub fn batch_phrase(global_batch: u64, sequence_length: u64) -> String {
    format!("{} of {}", plural(global_batch, "sequence"), plural(sequence_length, "token"))
}

/// A large number with three significant digits: `6.74 B`, `58.1 M`.
pub fn count(number: u64) -> String {
    let (value, unit) = match number {
        0..1_000 => return number.to_string(),
        1_000..1_000_000 => (number as f64 / 1e3, "k"),
        1_000_000..1_000_000_000 => (number as f64 / 1e6, "M"),
        1_000_000_000..1_000_000_000_000 => (number as f64 / 1e9, "B"),
        _ => (number as f64 / 1e12, "T"),
    };
    let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.decimals$} {unit}")
}

/// A rate with three significant digits and a decimal prefix: `312 TFLOP/s`, `9.81 GB/s`.
pub fn rate(per_second: f64, unit: &str) -> String {
    let prefixes = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let found = prefixes.into_iter().find(|(factor, _)| per_second.abs() >= 0.9995 * factor);
    let (factor, prefix) = found.unwrap_or((1.0, ""));
    let value = per_second / factor;
    let decimals = match value.abs() {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {prefix}{unit}/s")
}

/// A share in percent, with an exponent from 10⁵ % on.
pub fn percent(share: f64) -> String {
    percents(share * 100.0, 1)
}

/// A number of percent with the given decimals, or with an exponent from 10⁵ % on.
pub fn percents(number: f64, decimals: usize) -> String {
    if number.abs() < 1e5 { format!("{number:.decimals$} %") } else { format!("{number:.1e} %") }
}

/// As [`percents`], with a sign.
pub fn signed_percents(number: f64, decimals: usize) -> String {
    let sign = if number.is_sign_negative() { "" } else { "+" };
    format!("{sign}{}", percents(number, decimals))
}

/// Least ratio of the ends of an interval at which the value counts as unknown.
const UNKNOWN_RATIO: f64 = 4.0;

/// A 90 % interval in words, from its ends and their texts. An interval that spans a factor of four says that the value is
/// unknown.
pub fn interval_90([low, high]: [f64; 2], ends: [impl Display; 2]) -> String {
    let [low_text, high_text] = ends;
    let interval = format!("90 % interval: {low_text} to {high_text}");
    match low > 0.0 && high >= UNKNOWN_RATIO * low {
        true => format!("unknown within a factor of {:.0}; {interval}", high / low),
        false => interval,
    }
}

/// Half the width of an interval: `±38.1 %`, and beyond ±100 % the factor either way, `×2.4`, `×1.2e3`.
pub fn half_width(relative: f64) -> String {
    let factor = 1.0 + relative;
    match relative {
        ..=1.0 => format!("±{}", percent(relative)),
        ..99.0 => format!("×{factor:.1}"),
        _ => format!("×{factor:.1e}"),
    }
}

/// The mesh and the ZeRO stage: `tensor 1 × pipeline 1 × data 4, ZeRO-1`.
pub fn mesh_and_zero(plan: &Plan) -> String {
    let zero = plan.zero.label(plan.shard_size).map_or(String::new(), |zero| format!(", {zero}"));
    format!("{}{zero}", plan.mesh)
}

/// The mesh, the ZeRO stage, and of several pipeline stages their schedule: `tensor 1 × pipeline 4 × data 2, ZeRO-1,
/// zero-bubble`.
pub fn mesh_and_schedule(plan: &Plan) -> String {
    let schedule = schedule(plan).map_or(String::new(), |schedule| format!(", {schedule}"));
    let attention = match plan.context_attention {
        ContextAttention::Exchange => "",
        ContextAttention::Gather => ", gathered keys",
        ContextAttention::Ring => ", ring attention",
    };
    format!("{}{attention}{schedule}", mesh_and_zero(plan))
}

/// The schedule of several pipeline stages: `interleaved (2 chunks)`. `None` for one stage.
pub fn schedule(plan: &Plan) -> Option<String> {
    (plan.mesh.pipeline > 1).then(|| plan.schedule.label(plan.chunks()))
}

/// Mesh axes longer than one, schedule of a pipeline, microbatch and ZeRO stage: `T4 P2 D8 1F1B b2 Z1`.
pub fn plan_phrase(plan: &Plan) -> String {
    let schedule = (plan.mesh.pipeline > 1).then(|| match plan.schedule {
        PipelineSchedule::OneForwardOneBackward => "1F1B".into(),
        PipelineSchedule::ZeroBubble => "ZB".into(),
        PipelineSchedule::Interleaved => format!("v{}", plan.chunks()),
    });
    let micro_batch = format!("b{}", plan.workload.micro_batch);
    let parts = axes(plan).into_iter().chain(schedule).chain([micro_batch]).chain(zero(plan));
    parts.collect::<Vec<_>>().join(" ")
}

/// As [`plan_phrase`], without schedule and microbatch; `1 device` where no axis is longer than one.
pub fn mesh_phrase(plan: &Plan) -> String {
    let phrase = axes(plan).into_iter().chain(zero(plan)).collect::<Vec<_>>().join(" ");
    if phrase.is_empty() { "1 device".into() } else { phrase }
}

/// Letter of the attention on a context axis: `g` where keys and values are gathered, `r` where they rotate.
pub fn attention_mark(attention: ContextAttention) -> &'static str {
    match attention {
        ContextAttention::Exchange => "",
        ContextAttention::Gather => "g",
        ContextAttention::Ring => "r",
    }
}

/// Mesh axes longer than one: `T4`, `D8`, or `Cg2` where keys and values are gathered over the context axis.
fn axes(plan: &Plan) -> Vec<String> {
    let Mesh { tensor, context, pipeline, data } = plan.mesh;
    let context_axis = format!("C{}", attention_mark(plan.context_attention));
    let axes = [("T", tensor), (&context_axis, context), ("P", pipeline), ("D", data)].into_iter();
    axes.filter(|(_, size)| *size > 1).map(|(name, size)| format!("{name}{size}")).collect()
}

/// The ZeRO stage: `Z1`. `None` without ZeRO.
fn zero(plan: &Plan) -> Option<String> {
    zero_stage(plan.zero, plan.shard_size).map(|stage| format!("Z{stage}"))
}

/// Stage of ZeRO, and the replicas of a shard group where these are not all: `3/8`. `None` without ZeRO.
pub fn zero_stage(zero: Zero, shard_size: Option<u64>) -> Option<String> {
    let groups = shard_size.map_or(String::new(), |size| format!("/{size}"));
    (zero != Zero::Off).then(|| format!("{}{groups}", zero.stage()))
}

/// Rows with a header as CSV (RFC 4180).
pub fn csv_table(header: &[impl AsRef<str>], rows: impl Iterator<Item = Vec<String>>) -> String {
    let header = header.iter().map(|cell| cell.as_ref().to_owned()).collect();
    let line = |cells: Vec<String>| {
        cells.iter().map(|cell| csv_cell(cell)).collect::<Vec<_>>().join(",") + "\n"
    };
    std::iter::once(header).chain(rows).map(line).collect()
}

/// A cell of a CSV file, quoted where needed.
fn csv_cell(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// A word of a command line, quoted where a shell would split or expand it.
pub fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=.,:/+@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_singulars() {
        assert_eq!(batch_phrase(32, 1), "32 sequences of 1 token");
        assert_eq!(batch_phrase(1, 4096), "1 sequence of 4,096 tokens");
    }

    #[test]
    fn cells_with_separators_are_quoted() {
        let rows = [vec!["a,b".to_owned(), "say \"x\"".to_owned()]];
        let text = csv_table(&["one", "two"], rows.into_iter());
        assert_eq!(text, "one,two\n\"a,b\",\"say \"\"x\"\"\"\n");
    }

    #[test]
    fn numbers_are_formatted() {
        assert_eq!(count(6_738_415_616), "6.74 B");
        assert_eq!(count(15_000_000_000_000), "15.0 T");
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
    fn intervals_that_span_a_factor_of_four_are_unknown() {
        let words = |ends| interval_90(ends, ends);
        assert_eq!(words([1.0, 3.9]), "90 % interval: 1 to 3.9");
        assert_eq!(words([0.5, 4.0]), "unknown within a factor of 8; 90 % interval: 0.5 to 4");
        assert_eq!(words([0.0, 0.0]), "90 % interval: 0 to 0", "a price of zero");
    }

    #[test]
    fn words_that_a_shell_would_change_are_quoted() {
        for (word, expected) in [
            ("--devices=8", "--devices=8"),
            ("devices=8..64*2", "'devices=8..64*2'"),
            ("my model.json", "'my model.json'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
        ] {
            assert_eq!(shell_word(word), expected);
        }
    }
}
