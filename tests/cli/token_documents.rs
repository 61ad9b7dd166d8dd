//! Inputs of `data` that have tokens already.

use std::fs;
use std::path::Path;

use super::data::{tokenizer, tokens, within};
use super::{failure, json};

/// An indexed dataset of Megatron-LM with the u16 tokens 1, 2, 3, 2, 1.
pub fn write_megatron(path: &Path, lengths: &[i32], pointers: &[i64], boundaries: &[i64]) {
    let tokens: [u16; 5] = [1, 2, 3, 2, 1];
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    fs::write(path.with_extension("bin"), bytes).unwrap();
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(8);
    index.extend([lengths.len(), boundaries.len()].iter().flat_map(|n| (*n as u64).to_le_bytes()));
    index.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    index.extend(pointers.iter().flat_map(|start| start.to_le_bytes()));
    index.extend(boundaries.iter().flat_map(|boundary| boundary.to_le_bytes()));
    fs::write(path.with_extension("idx"), index).unwrap();
}

/// A nanoset with u16 tokens.
pub fn write_nanoset(path: &Path, documents: &[&[u16]]) {
    let bytes: Vec<u8> = documents.concat().iter().flat_map(|token| token.to_le_bytes()).collect();
    fs::write(path, bytes).unwrap();
    let mut end = 0u64;
    let ends = documents.iter().map(|document| {
        end += document.len() as u64;
        end
    });
    write_ends(path, &ends.collect::<Vec<u64>>());
    write_metadata(path, &format!("some/tokenizer|2\n{end}\n0.0K tokens"));
}

/// The index of a nanoset.
fn write_ends(path: &Path, ends: &[u64]) {
    let ends: Vec<u8> = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
    fs::write(format!("{}.index", path.display()), ends).unwrap();
}

/// The metadata of a nanoset.
fn write_metadata(path: &Path, text: &str) {
    fs::write(format!("{}.metadata", path.display()), text).unwrap();
}

#[test]
fn sequences_of_megatron_are_read_at_their_own_pointers() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer()).unwrap();
    let line = "data @m.idx --tokenizer @tokenizer.json --output @t.tokens";
    for (lengths, pointers, boundaries, expected) in [
        (&[1, 2, 2][..], &[0, 2, 6][..], &[0, 1, 3][..], &[1, 4, 2, 3, 2, 1][..]),
        // An empty document, and sequences in another order than their tokens.
        (&[1, 2, 2], &[0, 6, 2], &[0, 0, 3], &[4, 1, 2, 1, 2, 3]),
        (&[5], &[0], &[0, 1], &[1, 2, 3, 2, 1]),
    ] {
        write_megatron(&folder.path().join("m"), lengths, pointers, boundaries);
        let answer = json(&within(folder.path(), line));
        assert_eq!(tokens(&folder.path().join("t.tokens")), expected, "{boundaries:?}");
        assert_eq!(answer["document_count"], boundaries.len() - 1);
    }
}

#[test]
fn an_index_of_megatron_that_cannot_be_right_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer()).unwrap();
    let line = within(folder.path(), "data @m.idx --tokenizer @tokenizer.json --output @t.tokens");
    let (lengths, pointers) = ([1, 2, 2], [0, 2, 6]);
    for (lengths, pointers, boundaries, part) in [
        (
            lengths,
            pointers,
            &[0, 1][..],
            "document_indices[1]: is 1, where the last document ends, and there are 3 sequences",
        ),
        (
            lengths,
            pointers,
            &[1, 3],
            "document_indices[0]: is 1, and the first document begins with sequence 0",
        ),
        (
            lengths,
            pointers,
            &[0, 2, 1, 3],
            "document_indices[2]: is 1, and the document that ends there begins with sequence 2",
        ),
        (
            lengths,
            pointers,
            &[0, 1, 2, 4],
            "document_indices[3]: is 4, where the last document ends, and there are 3 sequences",
        ),
        (lengths, pointers, &[0, 5, 3], "document_indices[1]: is 5, and there are 3 sequences"),
        (lengths, pointers, &[0, -1, 3], "document_indices[1]: is -1, and there are 3 sequences"),
        (
            [1, -2, 2],
            pointers,
            &[0, 3],
            "sequence_lengths[1]: is -2, and no sequence has a negative one",
        ),
        (
            lengths,
            [0, 2, -6],
            &[0, 3],
            "sequence_pointers[2]: is -6, and no sequence has a negative one",
        ),
        (lengths, [0, 2, 8], &[0, 3], "has 2 tokens from byte 8 on, and "),
    ] {
        write_megatron(&folder.path().join("m"), &lengths, &pointers, boundaries);
        let message = failure(&line, 2);
        assert!(message.contains(&format!("m.idx: {part}")), "{message}");
        assert!(message.contains("hint: "), "{message}");
        assert!(!folder.path().join("t.tokens").exists());
    }
}

#[test]
fn an_index_of_a_nanoset_that_descends_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer()).unwrap();
    write_nanoset(&folder.path().join("n.ds"), &[&[1, 2, 3, 2]]);
    write_ends(&folder.path().join("n.ds"), &[3, 2, 4]);
    let line = "data @n.ds --tokenizer @tokenizer.json --output @t.tokens";
    let message = failure(&within(folder.path(), line), 2);
    let expected = "n.ds.index: document 2 ends at token 2, before it begins at 3";
    assert!(message.contains(expected), "{message}");
    assert!(!folder.path().join("t.tokens").exists());
}

/// Without a check, the tokens after the last entry of the index would be left out.
#[test]
fn a_nanoset_of_files_that_disagree_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("tokenizer.json"), tokenizer()).unwrap();
    let line = "data @n.ds --tokenizer @tokenizer.json --output @t.tokens";
    let cut = |name: &str, bytes: usize| {
        let whole = fs::read(at(name)).unwrap();
        fs::write(at(name), &whole[..whole.len() - bytes]).unwrap();
    };
    let cases: [(&dyn Fn(), &str); 8] = [
        (
            &|| write_ends(&at("n.ds"), &[4]),
            "n.ds.index: ends at token 4, and @n.ds has 10 tokens of 2 bytes",
        ),
        (&|| write_ends(&at("n.ds"), &[]), "n.ds.index: ends at token 0, and @n.ds has 10 tokens"),
        (
            &|| cut("n.ds.index", 3),
            "n.ds.index: has 13 bytes, and the end of a document takes 8 bytes",
        ),
        (
            &|| cut("n.ds", 1),
            "n.ds: has 19 bytes, where @n.ds.metadata says that a token takes 2 bytes",
        ),
        (&|| cut("n.ds", 2), "n.ds.metadata: line 2: is `10`, and @n.ds has 9 tokens of 2 bytes"),
        (
            &|| write_metadata(&at("n.ds"), "tok|2\n999\n"),
            "n.ds.metadata: line 2: is `999`, and @n.ds has 10 tokens",
        ),
        // The width that the metadata states is wrong, not the index.
        (
            &|| write_metadata(&at("n.ds"), "tok|4\n10\n"),
            "n.ds.metadata: line 2: is `10`, and @n.ds has 5 tokens of 4 bytes",
        ),
        (&|| write_metadata(&at("n.ds"), "tok|2\nten\n"), "n.ds.metadata: line 2: is `ten`"),
    ];
    for (damage, part) in cases {
        write_nanoset(&at("n.ds"), &[&[1, 2, 3, 2], &[1, 2, 3, 2, 1, 3]]);
        damage();
        let message = failure(&within(folder.path(), line), 2);
        assert!(message.contains(&within(folder.path(), part)), "{part} in {message}");
        assert!(message.contains("hint: "), "{message}");
        assert!(!at("t.tokens").exists());
    }
    // Some programs write the first line of the metadata alone.
    write_nanoset(&at("n.ds"), &[&[1, 2, 3, 2]]);
    write_metadata(&at("n.ds"), "tok|2");
    json(&within(folder.path(), line));
}

#[test]
fn an_unknown_id_names_the_file_that_states_its_width() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer()).unwrap();
    write_nanoset(&folder.path().join("n.ds"), &[&[1, 999]]);
    let line = "data @n.ds --tokenizer @tokenizer.json --output @t.tokens";
    let message = failure(&within(folder.path(), line), 2);
    let expected = within(folder.path(), "where @n.ds.metadata says that an id takes 2 bytes");
    assert!(message.contains("n.ds: byte 2: id 999 ") && message.contains(&expected), "{message}");
    assert!(!message.contains("n.ds.index"), "{message}");
}

#[test]
fn an_index_of_megatron_without_a_header_ends_too_early() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer()).unwrap();
    let line = within(folder.path(), "data @m.idx --tokenizer @tokenizer.json --output @t.tokens");
    write_megatron(&folder.path().join("m"), &[5], &[0], &[0, 1]);
    for bytes in [0, 33] {
        fs::write(folder.path().join("m.idx"), &b"MMIDIDX\0\0".repeat(4)[..bytes]).unwrap();
        let message = failure(&line, 2);
        let expected =
            format!("m.idx: ends too early: it has {bytes} bytes, and its header takes 34");
        assert!(message.contains(&expected), "{message}");
    }
}
