//! Token files on the command line.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{failure, json as answer_of, narrows, stdout};

/// A tokenizer of words separated by blanks, with an end-of-text token.
fn tokenizer() -> String {
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
fn within(folder: &Path, arguments: &str) -> String {
    arguments.replace('@', &format!("{}/", folder.display()))
}

/// The tokens of a file with the usual header.
fn tokens(path: &Path) -> Vec<u16> {
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
    assert!(report.contains("id 4 between documents"), "{report}");
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
        ("data --output @t", "<TEXT>"),
        ("data --inspect @t --output @t", "--inspect"),
        ("data @no.txt @never.txt --output @t", "never.txt: cannot be read: No such file"),
        ("data @ --output @t", "is a folder"),
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
        ("data --inspect -", "--inspect: a token file is memory-mapped"),
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
