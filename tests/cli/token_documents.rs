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
}

/// The index and the metadata of a nanoset.
fn write_ends(path: &Path, ends: &[u64]) {
    let beside = |ending: &str| format!("{}{ending}", path.display());
    let ends: Vec<u8> = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
    fs::write(beside(".index"), ends).unwrap();
    fs::write(beside(".metadata"), "some/tokenizer|2\n4\n0.0K tokens").unwrap();
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
