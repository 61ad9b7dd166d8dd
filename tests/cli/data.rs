//! Token files on the command line.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::basic::Compression as ParquetCompression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

use super::token_documents::{write_megatron, write_nanoset};
use super::{failure, json as answer_of, narrows, stdout};

/// A tokenizer of words separated by blanks, with an end-of-text token.
pub fn tokenizer() -> String {
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [added(0, "<unk>"), added(4, "</s>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "<unk>",
            "vocab": {"<unk>": 0, "call": 1, "me": 2, "ishmael": 3}}
    })
    .to_string()
}

/// A folder with texts and tokenizers.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("a.txt", "call me\nishmael\n"),
        ("b.txt", "me too"),
        ("empty.txt", ""),
        ("tokenizer.json", &tokenizer()),
        ("broken.json", &tokenizer().replace("WordLevel", "WordLadder")),
    ] {
        fs::write(folder.path().join(name), text).unwrap();
    }
    fs::write(folder.path().join("latin1.txt"), b"call me\nishma\xeb\nl").unwrap();
    folder
}

/// Replaces `@` in arguments by a folder.
pub fn within(folder: &Path, arguments: &str) -> String {
    arguments.replace('@', &format!("{}/", folder.display()))
}

/// The tokens of a file with the usual header.
pub fn tokens(path: &Path) -> Vec<u16> {
    let bytes = fs::read(path).unwrap();
    bytes[256..].chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

#[test]
fn every_byte_is_a_token() {
    let folder = folder();
    let answer = answer_of(&within(folder.path(), "data @a.txt @b.txt --output @t.tokens"));
    let text = b"call me\nishmael\nme too";
    let path = folder.path().join("t.tokens");
    assert!(tokens(&path).iter().copied().eq(text.iter().map(|byte| u16::from(*byte))));
    let count = text.len();
    for (key, value) in [
        ("file", json!(path.to_str())),
        ("layout", json!("narrows-tokens/1")),
        ("token_count", json!(count)),
        ("token_width_bytes", json!(2)),
        ("file_bytes", json!(256 + 2 * count)),
        ("vocabulary_size", json!(256)),
        ("end_of_text_id", Value::Null),
        ("tokenizer", json!({"name": "bytes", "sha256": null})),
        ("document_count", json!(2)),
        ("document_separator", Value::Null),
        ("text_bytes", json!(count)),
        ("bytes_per_token", json!(1.0)),
    ] {
        assert_eq!(answer[key], value, "{key}");
    }
    let inspected = answer_of(&within(folder.path(), "data --inspect @t.tokens"));
    assert_eq!(inspected["tokens_sha256"], answer["tokens_sha256"]);
    assert_eq!(inspected["verified"], json!({"checksum": true, "largest_id": 116}));
    let report = stdout(&within(folder.path(), "data @a.txt @b.txt --output @t.tokens"));
    for part in ["22 bytes, 1.00 per token; 2 documents, joined without", "256 ids, bytes"] {
        assert!(report.contains(part), "{part} in {report}");
    }
    let report = stdout(&within(folder.path(), "data --inspect @t.tokens"));
    assert!(report.contains("no token between them"), "{report}");
}

#[test]
fn a_tokenizer_file_defines_the_tokens() {
    let folder = folder();
    let line = "data @a.txt @b.txt --tokenizer @tokenizer.json --output @t.tokens";
    let answer = answer_of(&within(folder.path(), line));
    // The file's truncation does not apply to documents, and an end-of-text token separates them.
    assert_eq!(tokens(&folder.path().join("t.tokens")), [1, 2, 3, 4, 2, 0]);
    for (key, value) in [
        ("token_count", json!(6)),
        ("vocabulary_size", json!(5)),
        ("end_of_text_id", json!(4)),
        ("document_separator", json!("</s>")),
        ("text_bytes", json!(22)),
    ] {
        assert_eq!(answer[key], value, "{key}");
    }
    let name = answer["tokenizer"]["name"].as_str().unwrap();
    assert!(name.ends_with("/tokenizer.json") && name.matches('/').count() == 1, "{name}");
    assert_eq!(answer["tokenizer"]["sha256"].as_str().map(str::len), Some(64));
    let report = stdout(&within(folder.path(), line));
    assert!(report.contains("3.67 per token; 2 documents, `</s>` between them"), "{report}");
    let report = stdout(&within(folder.path(), "data --inspect @t.tokens"));
    assert!(report.contains("end-of-text token 4 between them"), "{report}");
    assert!(report.contains("checksum and all token ids, the largest of which is 4"), "{report}");
}

#[test]
fn standard_input_can_be_a_text() {
    let folder = folder();
    let line = within(folder.path(), "data @b.txt - --output @t.tokens --format json");
    narrows(&line).write_stdin("\u{e9}").assert().success();
    let expected: Vec<u16> = "me too\u{e9}".bytes().map(u16::from).collect();
    assert_eq!(tokens(&folder.path().join("t.tokens")), expected);
    let line = within(folder.path(), "data @a.txt --tokenizer - --output @t.tokens");
    narrows(&line).write_stdin(tokenizer()).assert().success();
    assert_eq!(tokens(&folder.path().join("t.tokens")), [1, 2, 3]);
}

#[test]
fn a_text_may_exceed_every_buffer() {
    let folder = folder();
    let text = "call me\nishmael\n".repeat(200_000);
    fs::write(folder.path().join("long.txt"), &text).unwrap();
    let line = "data @long.txt --tokenizer @tokenizer.json --output @t.tokens";
    let answer = answer_of(&within(folder.path(), line));
    assert_eq!(answer["token_count"], 600_000);
    let tokens = tokens(&folder.path().join("t.tokens"));
    assert!(tokens.chunks(3).all(|sentence| sentence == [1, 2, 3]));
}

#[test]
fn the_shipped_book_is_tokenized() {
    let folder = folder();
    let line = "data data/moby-dick.txt --output @t.tokens";
    let answer = answer_of(&within(folder.path(), line));
    assert_eq!(answer["token_count"], fs::metadata("data/moby-dick.txt").unwrap().len());
}

#[test]
fn files_of_llm_c_are_inspected() {
    let folder = folder();
    let mut bytes = vec![0; 1024];
    bytes[..4].copy_from_slice(&20_240_520_i32.to_le_bytes());
    bytes[4] = 1;
    bytes[8] = 2;
    bytes.extend([5, 0, 80, 196]);
    fs::write(folder.path().join("gpt2.bin"), &bytes).unwrap();
    let line = within(folder.path(), "data --inspect @gpt2.bin");
    let inspected = answer_of(&line);
    assert_eq!(inspected["layout"], "llm.c GPT-2");
    assert_eq!(inspected["vocabulary_size"], Value::Null);
    assert_eq!(inspected["verified"], json!({"checksum": null, "largest_id": 50_256}));
    let report = stdout(&line);
    assert!(report.contains("length and all token ids, the largest of which is 50256"), "{report}");
}

#[test]
fn bad_input_is_located_and_leaves_no_files() {
    let folder = folder();
    let path = folder.path();
    let before = fs::read_dir(path).unwrap().count();
    for (arguments, part) in [
        ("data", "--output <FILE>"),
        ("data @a.txt", "--output <FILE>"),
        ("data --output @t", "<INPUT>"),
        ("data --inspect @t --output @t", "--inspect"),
        ("data --inspect @t --append-eos", "'--inspect <FILE>' cannot be used with '--append-eos'"),
        ("data --inspect @t --text-field body", "cannot be used with '--text-field <NAME>'"),
        ("data --inspect @t --weights 1", "cannot be used with '--weights <W,W,…>'"),
        ("data --inspect @t --input-format text", "cannot be used with '--input-format <FORMAT>'"),
        ("data --inspect @t --pad-to 3 --pad-id 0", "cannot be used with"),
        ("data @no.txt @never.txt --output @t", "never.txt: cannot be read: No such file"),
        ("data @ --output @b.txt", "b.txt` is an input too"),
        ("data @a.txt --output @", "cannot be written: it exists and is not a regular file"),
        ("data @a.txt --output @no/t", "no/t: cannot be written: there is no folder"),
        ("data @a.txt --output -", "--output: a token file cannot go to a stream"),
        ("data @a.txt --output @a.txt", "--output: `"),
        ("data @b.txt @./a.txt --output @a.txt", "a.txt` is an input too"),
        ("data @a.txt --tokenizer @tokenizer.json --output @tokenizer.json", "is an input too"),
        ("data - - --output @t", "two inputs are `-`"),
        ("data - --tokenizer - --output @t", "two inputs are `-`"),
        ("data @empty.txt --output @t", "empty.txt: there is no text"),
        (
            "data @a.txt @latin1.txt --tokenizer @tokenizer.json --output @t",
            "byte 13: is not UTF-8",
        ),
        ("data @a.txt --tokenizer @no.json --output @t", "no.json: cannot be read"),
        ("data @a.txt --tokenizer @broken.json --output @t", "broken.json: is not a tokenizer: "),
        ("data @a.txt --tokenizer @a.txt --output @t", "a.txt: is not a tokenizer: "),
        ("data @a.txt --tokenizer @latin1.txt --output @t", "is not text: byte 13"),
        ("data --inspect @a.txt", "a.txt: byte 0 (magic): \"call me\\n\" is not the magic number"),
        ("data --inspect @", "is not a regular file"),
        ("data --inspect @no", "no: cannot be read"),
        ("data --inspect -", "--inspect: a token file is read at any position"),
    ] {
        let message = failure(&within(path, arguments), 2);
        assert!(message.contains(part), "{arguments}: {message}");
        assert_eq!(fs::read_dir(path).unwrap().count(), before, "{arguments}");
    }
    assert_eq!(fs::read(path.join("a.txt")).unwrap(), b"call me\nishmael\n");
    let message =
        failure(&within(path, "data @no.txt @never.txt --tokenizer @a.txt --output -"), 2);
    assert_eq!(message.matches("error:").count(), 4, "{message}");
}

#[test]
fn a_failure_leaves_the_previous_file() {
    let folder = folder();
    let line = within(folder.path(), "data @a.txt @latin1.txt --output @t");
    stdout(&line);
    let before = fs::read(folder.path().join("t")).unwrap();
    failure(&format!("{line} --tokenizer {}/tokenizer.json", folder.path().display()), 2);
    assert_eq!(fs::read(folder.path().join("t")).unwrap(), before);
}

#[cfg(target_os = "linux")]
#[test]
fn what_a_killed_command_left_is_removed_by_the_next_one() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let names =
        [".narrows-t.tokens-aB3xYz.tmp", ".narrows-u.tokens-aB3xYz.tmp", ".narrows-aB3xYz.tmp"];
    names.iter().for_each(|name| fs::write(at(name), "unfinished").unwrap());
    let locked = fs::File::create(at(".narrows-t.tokens-bbbbbb.tmp")).unwrap();
    locked.lock().unwrap();
    stdout(&within(folder.path(), "data @a.txt --output @t.tokens"));
    assert!(at("t.tokens").exists() && at(".narrows-t.tokens-bbbbbb.tmp").exists());
    assert_eq!(names.map(|name| at(name).exists()), [false, true, true]);
}

#[test]
fn standard_input_is_not_replaced_while_it_is_read() {
    let folder = folder();
    let input = fs::File::open(folder.path().join("a.txt")).unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_narrows"))
        .args(["data", "-", "--output"])
        .env("XDG_CACHE_HOME", crate::CACHE)
        .arg(folder.path().join("a.txt"))
        .stdin(input)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("`-` is an input too"));
}

#[test]
fn a_damaged_file_fails_the_check() {
    let folder = folder();
    let line = within(folder.path(), "data --inspect @t.tokens");
    stdout(&within(folder.path(), "data @a.txt --output @t.tokens"));
    let path = folder.path().join("t.tokens");
    let good = fs::read(&path).unwrap();
    let mut changed = good.clone();
    changed[260] ^= 1;
    fs::write(&path, &changed).unwrap();
    let message = failure(&line, 1);
    assert!(message.contains("t.tokens: byte 256 (tokens): the tokens have SHA-256"), "{message}");
    fs::write(&path, &good[..good.len() - 1]).unwrap();
    let message = failure(&line, 2);
    assert!(message.contains("the file has 287 bytes, and its header says 288"), "{message}");
    let mut changed = good;
    changed[24] ^= 1;
    fs::write(&path, &changed).unwrap();
    let message = failure(&line, 2);
    assert!(message.contains("byte 224 (header checksum): the header does not have"), "{message}");
}

/// A Parquet file with the columns `id` and `content`.
fn write_parquet(path: &Path, texts: &[Option<&str>], compression: ParquetCompression) {
    let schema = "message m { required int64 id; optional binary content (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = fs::File::create(path).unwrap();
    let properties = WriterProperties::builder().set_compression(compression).build();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for texts in texts.chunks(2) {
        let mut group = writer.next_row_group().unwrap();
        let mut ids = group.next_column().unwrap().unwrap();
        let values = vec![7; texts.len()];
        ids.typed::<Int64Type>().write_batch(&values, None, None).unwrap();
        ids.close().unwrap();
        let mut contents = group.next_column().unwrap().unwrap();
        let present: Vec<i16> = texts.iter().map(|text| i16::from(text.is_some())).collect();
        let values: Vec<ByteArray> =
            texts.iter().flatten().map(|text| ByteArray::from(*text)).collect();
        contents.typed::<ByteArrayType>().write_batch(&values, Some(&present), None).unwrap();
        contents.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// A folder with a corpus in every format.
fn corpora() -> tempfile::TempDir {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let lines = "{\"text\": \"call me\", \"id\": 1}\n\n{\"id\": 2, \"text\": \"ishmael\"}\n";
    fs::write(at("a.jsonl"), lines).unwrap();
    fs::write(at("lines.txt"), lines).unwrap();
    fs::create_dir_all(at("parts/deep")).unwrap();
    let mut gzip = GzEncoder::new(vec![], Compression::fast());
    gzip.write_all(&lines.as_bytes()[..lines.len() / 2]).unwrap();
    let mut bytes = gzip.finish().unwrap();
    // As `cat a.gz b.gz` joins them.
    let mut gzip = GzEncoder::new(vec![], Compression::fast());
    gzip.write_all(&lines.as_bytes()[lines.len() / 2..]).unwrap();
    bytes.extend(gzip.finish().unwrap());
    fs::write(at("parts/1.json.gz"), bytes).unwrap();
    let compressed = zstd::encode_all(&b"me me"[..], 1).unwrap();
    fs::write(at("parts/deep/2.txt.zst"), compressed).unwrap();
    fs::write(at("parts/.hidden"), "call").unwrap();
    // A window above the one that the library reads by default.
    let mut long = zstd::Encoder::new(vec![], 1).unwrap();
    long.window_log(28).unwrap();
    long.write_all(b"me me").unwrap();
    fs::write(at("long.txt.zst"), long.finish().unwrap()).unwrap();
    fs::write(at("bom.jsonl"), format!("\u{feff}{lines}")).unwrap();
    for (name, compression) in [
        ("a.parquet", ParquetCompression::UNCOMPRESSED),
        ("zstd.parquet", ParquetCompression::ZSTD(Default::default())),
        ("brotli.parquet", ParquetCompression::BROTLI(Default::default())),
        ("lz4.parquet", ParquetCompression::LZ4_RAW),
    ] {
        write_parquet(&at(name), &[Some("call me"), Some(""), Some("ishmael")], compression);
    }
    write_megatron(&at("m"), &[1, 2, 2], &[0, 2, 6], &[0, 2, 3]);
    write_nanoset(&at("n.ds"), &[&[3], &[1, 2, 2]]);
    folder
}

#[test]
fn corpora_of_every_format_are_read() {
    let folder = corpora();
    for (inputs, expected) in [
        ("@a.jsonl", &[1, 2, 4, 3][..]),
        ("@lines.txt --input-format jsonl", &[1, 2, 4, 3]),
        ("@bom.jsonl", &[1, 2, 4, 3]),
        ("@a.jsonl --append-eos", &[1, 2, 4, 3, 4]),
        ("@a.jsonl --pad-to 3 --pad-id 0", &[1, 2, 0, 3, 0, 0]),
        ("@a.jsonl --pad-to 2 --pad-id 0 --append-eos", &[1, 4, 3, 4]),
        ("@parts", &[1, 2, 4, 3, 4, 2, 2]),
        ("@long.txt.zst", &[2, 2]),
        ("@a.parquet --text-field content", &[1, 2, 4, 4, 3]),
        ("@zstd.parquet --text-field content", &[1, 2, 4, 4, 3]),
        ("@brotli.parquet --text-field content", &[1, 2, 4, 4, 3]),
        ("@lz4.parquet --text-field content", &[1, 2, 4, 4, 3]),
        ("@m.idx", &[1, 2, 3, 4, 2, 1]),
        ("@m.bin @n.ds", &[1, 2, 3, 4, 2, 1, 4, 3, 4, 1, 2, 2]),
        ("@a.txt @a.jsonl", &[1, 2, 3, 4, 1, 2, 4, 3]),
    ] {
        let line = format!("data {inputs} --tokenizer @tokenizer.json --output @t.tokens");
        let answer = answer_of(&within(folder.path(), &line));
        assert_eq!(tokens(&folder.path().join("t.tokens")), expected, "{inputs}");
        assert_eq!(answer["token_count"], expected.len(), "{inputs}");
        // Padded documents have their end only where it is asked for.
        let has_end = !inputs.contains("--pad-to") || inputs.contains("--append-eos");
        assert_eq!(answer["end_of_text_id"], json!(has_end.then_some(4)), "{inputs}");
    }
    let bytes = within(folder.path(), "data @a.jsonl --output @t.tokens");
    assert_eq!(answer_of(&bytes)["text_bytes"], 14);
    assert_eq!(tokens(&folder.path().join("t.tokens")).len(), 14);
}

/// The tokenizer has no token for unknown words, and drops them.
#[test]
fn an_input_without_tokens_is_warned_of_or_refused() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let words = json!({
        "version": "1.0", "normalizer": null, "post_processor": null, "decoder": null,
        "added_tokens": [{"id": 2, "content": "</s>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": null,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    });
    fs::write(at("letters.json"), words.to_string()).unwrap();
    fs::write(at("ab.txt"), "ab").unwrap();
    fs::write(at("zz.txt"), "zz").unwrap();
    let line = |inputs: &str| {
        within(folder.path(), &format!("data {inputs} --tokenizer @letters.json --output @t"))
    };
    let made = narrows(&line("@ab.txt @zz.txt @empty.txt")).assert().success();
    let [out, err] = [&made.get_output().stdout, &made.get_output().stderr]
        .map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(out.contains("  1 token, 25.0 %, of "), "{out}");
    assert!(!err.contains("ab.txt"), "{err}");
    for name in ["zz.txt", "empty.txt"] {
        let warning = format!("warning: {} has no tokens: it is empty, or ", at(name).display());
        assert!(err.contains(&warning), "{err}");
    }
    fs::remove_file(at("t")).unwrap();
    let error = failure(&line("@zz.txt @zz.txt"), 2);
    assert!(error.contains("zz.txt: has no tokens\n"), "{error}");
    assert!(!at("t").exists());
}

/// As `--append-eod` of Megatron-LM and datatrove end documents.
#[test]
fn documents_of_token_files_keep_the_end_that_they_have() {
    let folder = corpora();
    write_nanoset(&folder.path().join("e.ds"), &[&[3, 4], &[1, 4], &[2, 2]]);
    for (flags, expected, summary) in [
        ("", &[3, 4, 1, 4, 2, 2][..], "documents   3 documents, `</s>` between them\n"),
        ("--append-eos", &[3, 4, 1, 4, 2, 2, 4], "documents   3 documents, `</s>` after each\n"),
    ] {
        let line = format!("data @e.ds --tokenizer @tokenizer.json {flags} --output @t.tokens");
        let report = stdout(&within(folder.path(), &line));
        assert_eq!(tokens(&folder.path().join("t.tokens")), expected, "{flags}");
        assert!(report.contains(summary), "{report}");
        assert!(!report.contains("per token"), "{report}");
    }
    let line = "data @e.ds @a.jsonl --tokenizer @tokenizer.json --output @t.tokens";
    let answer = answer_of(&within(folder.path(), line));
    assert_eq!((&answer["text_bytes"], &answer["bytes_per_token"]), (&json!(14), &Value::Null));
    let report = stdout(&within(folder.path(), line));
    assert!(report.contains("14 bytes and tokens; 5 documents"), "{report}");
}

#[test]
fn weights_are_shares_of_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |word: &str, count: usize| format!("{{\"text\": \"{word}\"}}\n").repeat(count);
    fs::write(folder.path().join("a.jsonl"), lines("aaaa", 300)).unwrap();
    fs::write(folder.path().join("b.jsonl"), lines("bb", 400)).unwrap();
    let line = within(folder.path(), "data @a.jsonl @b.jsonl --weights 3,1 --output @t.tokens");
    let answer = answer_of(&line);
    let inputs = answer["inputs"].as_array().unwrap();
    let tokens_of = |index: usize| inputs[index]["tokens"].as_u64().unwrap();
    // All of the first, which is exhausted before the second, and a third as much of that.
    assert_eq!((tokens_of(0), tokens_of(1)), (1200, 400));
    let tokens = tokens(&folder.path().join("t.tokens"));
    for part in tokens.chunks(160) {
        let share = part.iter().filter(|token| **token == u16::from(b'a')).count();
        assert!((116..=124).contains(&share), "{share} of 160");
    }
    let report = stdout(&line);
    assert!(report.contains("1,200 tokens, 75.0 %, of "), "{report}");
}

#[test]
fn damaged_corpora_are_located() {
    let folder = corpora();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("bad.jsonl"), "{\"text\": \"call\"}\n{\"body\": \"me\"}\n").unwrap();
    fs::write(at("cut.jsonl"), "{\"text\": \"call\"}\n{\"text\": \"me\n").unwrap();
    fs::write(at("number.jsonl"), "{\"text\": 1}\n").unwrap();
    fs::copy(at("a.parquet"), at("parquet.txt")).unwrap();
    let gzip = fs::read(at("parts/1.json.gz")).unwrap();
    fs::write(at("cut.json.gz"), &gzip[..gzip.len() - 12]).unwrap();
    let parquet = fs::read(at("a.parquet")).unwrap();
    fs::write(at("cut.parquet"), &parquet[..parquet.len() / 2]).unwrap();
    fs::write(at("short.bin"), [1, 0]).unwrap();
    fs::write(at("lone.bin"), [255, 0]).unwrap();
    fs::copy(at("m.idx"), at("short.idx")).unwrap();
    let index = fs::read(at("m.idx")).unwrap();
    fs::write(at("x.bin"), "").unwrap();
    fs::write(at("x.idx"), &index[..index.len() - 1]).unwrap();
    fs::create_dir(at("empty")).unwrap();
    fs::write(at("array.json"), "[{\"text\": \"call\"}]").unwrap();
    fs::write(at("pretty.json"), "{\n  \"text\": \"call\"\n}\n").unwrap();
    fs::write(at("null.jsonl"), "{\"text\": null}\n").unwrap();
    let uncompressed = ParquetCompression::UNCOMPRESSED;
    write_parquet(&at("null.parquet"), &[Some("call me"), None], uncompressed);
    stdout(&within(folder.path(), "data @b.txt --output @t.tokens"));
    fs::write(at("gpt2.dat"), 20_240_520_i32.to_le_bytes()).unwrap();
    fs::write(at("bom.txt"), "\u{feff}{\"text\": \"call\"}\n").unwrap();
    fs::copy(at("m.idx"), at("large.idx")).unwrap();
    let mut tokens = fs::read(at("m.bin")).unwrap();
    tokens[4] = 9;
    fs::write(at("large.bin"), tokens).unwrap();
    for (inputs, part) in [
        ("@lines.txt", "lines.txt: has JSON lines, and would be read as text"),
        ("@lines.txt", "--input-format jsonl"),
        ("@parquet.txt", "parquet.txt: has a Parquet file, and would be read as text"),
        ("@bad.jsonl", "bad.jsonl: line 2: has no field `text`"),
        ("@bad.jsonl", "--text-field body"),
        ("@cut.jsonl", "cut.jsonl: line 2: is not a JSON object"),
        ("@number.jsonl", "number.jsonl: line 1: `text` is not a string"),
        ("@cut.json.gz", "cut.json.gz: "),
        ("@a.parquet", "a.parquet: has no column `text`"),
        ("@a.parquet", "hint: --text-field content\n"),
        ("@lone.bin", "lone.bin: byte 0: is not UTF-8"),
        ("@lone.bin", "lone.idx, if these are tokens of Megatron-LM"),
        ("@n.ds.index", "n.ds.index: is a part of a nanoset without its tokens"),
        ("@n.ds.metadata", "n.ds, which is read with it"),
        ("@cut.parquet", "cut.parquet: is not a Parquet file"),
        ("@a.parquet --text-field id", "a.parquet: row 1: column `id` has no texts"),
        ("@short.idx", "short.idx: has 2 tokens from byte 2 on, and "),
        ("@x.idx", "x.idx: has 93 bytes, which 3 sequences and 3 document boundaries do not take"),
        ("@n.ds.index --input-format nanoset", "n.ds.index.metadata: cannot be read"),
        ("- --input-format parquet", "is a stream, and this format needs a file"),
        ("@empty", "empty: is a folder without files"),
        ("@array.json", "array.json: line 1: is not a JSON object"),
        ("@array.json", "`jq -c '.[]'`"),
        ("@pretty.json", "`jq -c '.[]'`"),
        ("@null.jsonl", "null.jsonl: line 1: `text` is not a string"),
        ("@null.parquet --text-field content", "null.parquet: row 2: `content` is null"),
        ("@t.tokens", "t.tokens: is a token file already"),
        ("@t.tokens", "`narrows run --data` takes it as it is"),
        ("@gpt2.dat", "gpt2.dat: is a token file already"),
        ("@bom.txt", "bom.txt: has JSON lines, and would be read as text"),
        (
            "@large.idx",
            "large.bin: byte 4: id 9 is not below 5, the vocabulary size of the tokenizer, where",
        ),
        ("@large.idx", "--tokenizer FILE, the tokenizer that made these tokens"),
        ("@a.jsonl --weights 1,2", "--weights: has 2 weights for 1 input\n"),
        ("@a.jsonl @a.jsonl --weights 1", "--weights: has 1 weight for 2 inputs\n"),
        ("@a.jsonl --pad-id 0 --pad-to 99999999999", "99999999999 is not in 1..=16777216"),
        ("@a.jsonl --pad-to 4 --pad-id 5", "--pad-id: 5 is not below the vocabulary size 5"),
        ("@a.jsonl --pad-to 4", "--pad-id"),
    ] {
        let line = format!("data {inputs} --tokenizer @tokenizer.json --output @new.tokens");
        let message = failure(&within(folder.path(), &line), 2);
        assert!(message.contains(part), "{inputs}: {message}");
        assert!(!at("new.tokens").exists(), "{inputs}");
    }
    for (inputs, part) in [
        ("@m.idx", "m.idx: has tokens, of which the vocabulary is not known"),
        ("@a.jsonl --append-eos", "--append-eos: the tokenizer has no end-of-text token"),
    ] {
        let message = failure(&within(folder.path(), &format!("data {inputs} --output @n")), 2);
        assert!(message.contains(part), "{inputs}: {message}");
    }
    let mut piped = narrows(&within(folder.path(), "data - --output @n"));
    let lines = fs::read(at("lines.txt")).unwrap();
    let refused = piped.write_stdin(lines).assert().code(2);
    let message = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(message.contains("<stdin>: has JSON lines, and would be read as text"), "{message}");
    // A flag says that the lines are one text.
    let line = within(folder.path(), "data @lines.txt --input-format text --output @t.tokens");
    assert_eq!(answer_of(&line)["document_count"], 1);
}
