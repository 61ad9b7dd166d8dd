//! Token files and samplers, on invalid bytes and against simple reference code.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use arbtest::arbitrary::{self, Unstructured};
use narrows_plan::{Context, ContextAttention, Mesh, Precision, Workload, Zero};
use narrows_runtime::data::{
    Cursor, DataError, DataFault, LastTarget, Sampler, SamplerConfig, TargetRule, TokenFile,
    TokenFileInfo, TokenFileLayout, TokenWidth, TokenWriter, TokenizerId,
};
use narrows_runtime::session::{MeshCoordinates, TokenRows};
use narrows_runtime::{IGNORED_TARGET, sha256};

fn info(vocabulary: u32) -> TokenFileInfo {
    let tokenizer = TokenizerId { name: "test-é".into(), fingerprint: sha256(b"test") };
    TokenFileInfo { vocabulary, end_of_text: Some(vocabulary - 1), tokenizer }
}

fn write(path: &Path, vocabulary: u32, tokens: &[u32]) {
    let mut writer = TokenWriter::create(path, info(vocabulary)).unwrap();
    for chunk in tokens.chunks(1000) {
        writer.push(chunk).unwrap();
    }
    writer.finish().unwrap();
}

/// The bytes of a token file with these tokens.
fn file_bytes(vocabulary: u32, tokens: &[u32]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.tokens");
    write(&path, vocabulary, tokens);
    fs::read(&path).unwrap()
}

fn open_bytes(bytes: Vec<u8>) -> Result<TokenFile, DataError> {
    TokenFile::from_bytes(Path::new("t.tokens"), bytes)
}

fn read_all(file: &TokenFile) -> Result<Vec<u32>, DataError> {
    let mut tokens = vec![0; file.token_count() as usize];
    file.read_tokens(0, u32::MAX, &mut tokens)?;
    Ok(tokens)
}

/// A token file of llm.c.
fn llm_c(magic: i32, version: i32, count: i32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 1024];
    for (at, field) in [magic, version, count].into_iter().enumerate() {
        bytes[4 * at..4 * at + 4].copy_from_slice(&field.to_le_bytes());
    }
    bytes.extend(payload);
    bytes
}

#[test]
fn written_tokens_are_read_back() {
    for (vocabulary, width) in [
        (1, TokenWidth::U16),
        (256, TokenWidth::U16),
        (1 << 16, TokenWidth::U16),
        ((1 << 16) + 1, TokenWidth::U32),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.tokens");
        let tokens: Vec<u32> = (0..40_001).map(|at| (at * 7919) % vocabulary).collect();
        write(&path, vocabulary, &tokens);
        let file = TokenFile::open(&path).unwrap();
        assert_eq!(read_all(&file).unwrap(), tokens);
        let header = file.header();
        assert_eq!((header.layout, header.width), (TokenFileLayout::Narrows, width));
        assert_eq!(
            (header.vocabulary, header.end_of_text),
            (Some(vocabulary), Some(vocabulary - 1))
        );
        assert_eq!(header.tokenizer, Some(info(1).tokenizer));
        file.verify_checksum().unwrap();
        assert_eq!(file.validate_tokens(u32::MAX).unwrap(), tokens.iter().copied().max());
        let payload = &fs::read(&path).unwrap()[256..];
        assert_eq!(file.fingerprint().unwrap(), sha256(payload));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

/// Byte by byte as in docs/token-files.md.
#[test]
fn the_layout_is_as_documented() {
    let bytes = file_bytes(300, &[7, 299, 258]);
    let payload = [7, 0, 43, 1, 2, 1];
    assert_eq!(bytes[256..], payload);
    let mut expected = b"NRWTOKEN".to_vec();
    for field in [1_u32, 2, 300, 299, 3, 0] {
        expected.extend(field.to_le_bytes());
    }
    expected.extend(sha256(&payload));
    expected.extend(sha256(b"test"));
    expected.extend("test-é".as_bytes());
    expected.resize(224, 0);
    expected.extend(sha256(&expected));
    assert_eq!(bytes[..256], expected);
}

#[test]
fn long_names_are_truncated_between_characters() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t");
    let tokenizer = TokenizerId { name: format!("x{}", "é".repeat(60)), ..TokenizerId::bytes() };
    let writer = TokenWriter::create(&path, TokenFileInfo { tokenizer, ..TokenFileInfo::bytes() });
    writer.unwrap().finish().unwrap();
    let file = TokenFile::open(&path).unwrap();
    assert_eq!(file.header().tokenizer.as_ref().unwrap().name, format!("x{}", "é".repeat(47)));
    assert_eq!(file.token_count(), 0);
}

#[test]
fn a_file_appears_complete_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.tokens");
    fs::write(&path, "old").unwrap();
    let mut writer = TokenWriter::create(&path, TokenFileInfo::bytes()).unwrap();
    writer.push(&[1; 100_000]).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    let error = writer.push(&[1, 2, 256]).unwrap_err();
    assert!(
        error.to_string().ends_with("token 100002: id 256 is not below the vocabulary size 256"),
        "{error}"
    );
    drop(writer);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    for path in [folder.path().to_path_buf(), folder.path().join("no/t.tokens")] {
        let error = TokenWriter::create(&path, TokenFileInfo::bytes()).unwrap_err();
        assert!(error.to_string().contains("cannot be written: "), "{error}");
        assert!(!error.to_string().contains(".narrows-"), "{error}");
    }
}

#[test]
fn an_open_file_keeps_its_tokens_when_it_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.tokens");
    write(&path, 256, &[1, 2, 3]);
    let old = TokenFile::open(&path).unwrap();
    write(&path, 256, &[4]);
    assert_eq!(read_all(&old).unwrap(), [1, 2, 3]);
    assert_eq!(read_all(&TokenFile::open(&path).unwrap()).unwrap(), [4]);
}

#[test]
fn llm_c_files_are_read() {
    let gpt2 = open_bytes(llm_c(20_240_520, 1, 3, &[1, 0, 255, 0, 80, 196])).unwrap();
    assert_eq!(read_all(&gpt2).unwrap(), [1, 255, 50_256]);
    assert_eq!((gpt2.header().layout, gpt2.header().vocabulary), (TokenFileLayout::LlmCGpt2, None));
    let llama3 = open_bytes(llm_c(20_240_801, 7, 2, &[9, 0, 0, 0, 0, 244, 1, 0])).unwrap();
    assert_eq!(read_all(&llama3).unwrap(), [9, 128_000]);
    assert_eq!(llama3.header().layout, TokenFileLayout::LlmCLlama3);
    llama3.verify_checksum().unwrap();
    assert_eq!(llama3.validate_tokens(128_001).unwrap(), Some(128_000));
    let error = llama3.validate_tokens(128_000).unwrap_err();
    assert!(error.to_string().contains("byte 1028 (token 1): id 128000 is not below"), "{error}");
    assert_eq!(gpt2.fingerprint().unwrap(), sha256(&[1, 0, 255, 0, 80, 196]));
}

/// Every kind of corruption, with its location and message.
#[test]
fn corruption_is_reported_with_its_location() {
    let good = file_bytes(300, &[7, 299, 258]);
    let resealed = |at: usize, field: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        let checksum = sha256(&bytes[..224]);
        bytes[224..256].copy_from_slice(&checksum);
        bytes
    };
    let mut flipped = good.clone();
    flipped[17] ^= 1;
    let cases = [
        (vec![], "t.tokens: is empty"),
        (b"Call me Ishmael".to_vec(), "byte 0 (magic): \"Call me \" is not the magic number"),
        (good[..200].to_vec(), "the file ends within its header: it has 200 of 256 bytes"),
        (good[..261].to_vec(), "the file has 261 bytes, and its header says 262"),
        ([&good[..], &[0]].concat(), "the file has 263 bytes, and its header says 262"),
        (flipped, "byte 224 (header checksum): the header does not have"),
        (resealed(8, &[2]), "byte 8 (version): 2 is not 1"),
        (resealed(12, &[3]), "byte 12 (token width): tokens have 2 or 4 bytes, not 3"),
        (resealed(16, &[0, 0]), "byte 16 (vocabulary size): "),
        (resealed(20, &[44, 1]), "byte 20 (end of text): id 300 is not below"),
        (resealed(24, &[255; 8]), "and its header says 18446744073709551615"),
        (resealed(98, &[255]), "byte 98 (tokenizer name): is not UTF-8"),
        (resealed(200, &[9]), "byte 200 (reserved): is not zero"),
        (llm_c(20_240_520, 1, 3, &[0; 5]), "has 1029 bytes, and its header says 1030"),
        (llm_c(20_240_520, 1, -1, &[]), "byte 8 (token count): -1 is negative"),
        (llm_c(20_240_520, 7, 0, &[]), "byte 4 (version): llm.c GPT-2 has version 1, not 7"),
        (
            llm_c(20_240_801, 7, 0, &[])[..9].to_vec(),
            "ends within its header: it has 9 of 1024 bytes",
        ),
        (llm_c(20_240_522, 1, 0, &[]), "byte 0 (magic): llm.c's multiple-choice"),
    ];
    for (bytes, message) in cases {
        let error = open_bytes(bytes).expect_err(message);
        let text = error.to_string();
        assert!(text.starts_with("t.tokens: ") && text.contains(message), "{message}: {text}");
        assert!(error.fault.hint().is_some(), "{message}");
    }
    let mut changed = good.clone();
    changed[257] = 5;
    let file = open_bytes(changed).unwrap();
    let error = file.verify_checksum().unwrap_err();
    assert!(error.to_string().contains("byte 256 (tokens): the tokens have SHA-256"), "{error}");
    let error = file.validate_tokens(u32::MAX).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("byte 256 (token 0): id 1287 is not below the vocabulary size 300"),
        "{error}"
    );
}

#[test]
fn other_than_regular_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let error = TokenFile::open(folder.path()).unwrap_err();
    assert!(matches!(error.fault, DataFault::NotRegularFile), "{error}");
    let error = TokenFile::open(&folder.path().join("none")).unwrap_err();
    assert!(error.to_string().contains("none: cannot be read: "), "{error}");
    #[cfg(unix)]
    assert!(TokenFile::open(Path::new("/dev/null")).is_err());
}

/// Calls every method on a file of these bytes, if it can be opened.
fn exercise(bytes: Vec<u8>) {
    let Ok(file) = open_bytes(bytes) else { return };
    let _ =
        (file.verify_checksum(), file.validate_tokens(50_257), read_all(&file), file.fingerprint());
    let config = SamplerConfig {
        sequence_length: 3,
        vocabulary: u32::MAX,
        seed: 1,
        targets: TargetRule::default(),
    };
    let Ok(sampler) = Sampler::new(Arc::new(file), config) else { return };
    let (mut inputs, mut targets) = ([0; 6], [0; 6]);
    for first in [0, 5, u64::MAX - 2, u64::MAX] {
        let _ = sampler.fill(first, &mut inputs, &mut targets);
    }
}

#[test]
fn arbitrary_bytes_never_panic() {
    let seeds = [
        file_bytes(256, &[1, 2, 3, 4, 5, 6, 7]),
        file_bytes(70_000, &[69_999, 2, 3, 4, 5]),
        llm_c(20_240_520, 1, 4, &[1, 2, 3, 4, 5, 6, 7, 8]),
        llm_c(20_240_801, 7, 2, &[1, 2, 3, 4, 5, 6, 7, 8]),
    ];
    arbtest::arbtest(|u| {
        let mut bytes: Vec<u8> = u.choose(&seeds)?.clone();
        for _ in 0..u.int_in_range(1..=4)? {
            mutate(u, &mut bytes)?;
        }
        // A right checksum in half of the cases, so that the fields are checked too.
        if bytes.len() >= 256 && bytes.starts_with(b"NRW") && u.arbitrary()? {
            let checksum = sha256(&bytes[..224]);
            bytes[224..256].copy_from_slice(&checksum);
        }
        exercise(bytes);
        exercise(u.arbitrary()?);
        Ok(())
    })
    .budget_ms(700);
}

fn mutate(u: &mut Unstructured<'_>, bytes: &mut Vec<u8>) -> arbitrary::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    // Half of the mutations hit the fields, which are in the first 32 bytes.
    let end = if u.arbitrary()? { bytes.len().min(32) } else { bytes.len() };
    let at = u.choose_index(end)?;
    match u.int_in_range(0..=3)? {
        0 => bytes[at] = u.arbitrary()?,
        1 => bytes[at] ^= 1 << u.int_in_range(0..=7)?,
        2 => bytes.truncate(at),
        _ => bytes.insert(at, u.arbitrary()?),
    }
    Ok(())
}

#[test]
fn every_flipped_bit_is_detected() {
    let good = file_bytes(300, &[7, 299, 258, 1]);
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let detected = open_bytes(bytes).and_then(|file| file.verify_checksum()).is_err();
        assert!(detected, "bit {bit}");
    }
}

/// A file whose tokens are their own indices.
fn counting_file(tokens: u64) -> Arc<TokenFile> {
    let tokens: Vec<u32> = (0..tokens as u32).collect();
    Arc::new(open_bytes(file_bytes(1 << 20, &tokens)).unwrap())
}

fn sampler(tokens: u64, sequence_length: u64, seed: u64) -> Sampler {
    Sampler::new(
        counting_file(tokens),
        SamplerConfig {
            sequence_length,
            vocabulary: 1 << 20,
            seed,
            targets: TargetRule::default(),
        },
    )
    .unwrap()
}

/// Inputs and targets of `length` tokens from a sequence on.
fn sequence(sampler: &Sampler, number: u64, length: usize) -> (Vec<u32>, Vec<u32>) {
    let (mut inputs, mut targets) = (vec![0; length], vec![0; length]);
    sampler.fill(number, &mut inputs, &mut targets).unwrap();
    (inputs, targets)
}

#[test]
fn targets_follow_their_rule() {
    const IGNORED: u32 = IGNORED_TARGET;
    for (last, pad_id, tokens, windows, targets) in [
        (LastTarget::Next, None, 9, 2, [5, 6, 7, 8]),
        (LastTarget::Next, Some(6), 9, 2, [5, IGNORED, 7, 8]),
        (LastTarget::Ignored, None, 9, 2, [5, 6, 7, IGNORED]),
        (LastTarget::Ignored, Some(5), 8, 2, [IGNORED, 6, 7, IGNORED]),
        (LastTarget::Ignored, None, 7, 1, [1, 2, 3, IGNORED]),
        (LastTarget::Next, None, 8, 1, [1, 2, 3, 4]),
    ] {
        let targets_rule = TargetRule { last, pad_id };
        let (sequence_length, vocabulary) = (4, 1 << 20);
        let config = SamplerConfig { sequence_length, vocabulary, seed: 1, targets: targets_rule };
        let sampler = Sampler::new(counting_file(tokens), config).unwrap();
        assert_eq!(sampler.windows(), windows, "{last:?} of {tokens}");
        let (mut inputs, mut actual) = ([0; 4], [0; 4]);
        sampler.fill_window(windows - 1, &mut inputs, &mut actual).unwrap();
        assert_eq!(actual, targets, "{last:?}, {pad_id:?} of {tokens}");
        let text = serde_json::to_string(&sampler.cursor(1)).unwrap();
        assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), sampler.cursor(1));
    }
}

#[test]
fn every_window_is_read_once_an_epoch() {
    arbtest::arbtest(|u| {
        let length = u.int_in_range(1..=9)?;
        let windows = u.int_in_range(1..=40)?;
        let tail = u.int_in_range(0..=length - 1)?;
        let sampler = sampler(windows * length + 1 + tail, length, u.arbitrary()?);
        assert_eq!(sampler.windows(), windows);
        let epoch = u.int_in_range(0..=1000)?;
        let mut starts = vec![];
        for number in epoch * windows..(epoch + 1) * windows {
            assert_eq!(sampler.epoch(number), epoch);
            let (inputs, targets) = sequence(&sampler, number, length as usize);
            let start = inputs[0];
            assert!(inputs.iter().copied().eq(start..start + length as u32));
            assert!(targets.iter().copied().eq(start + 1..start + 1 + length as u32));
            starts.push(u64::from(start));
        }
        starts.sort_unstable();
        assert!(starts.iter().copied().eq((0..windows).map(|window| window * length)));
        Ok(())
    })
    .budget_ms(700);
}

#[test]
fn epochs_and_seeds_differ() {
    let order = |seed: u64, epoch: u64| -> Vec<u64> {
        let sampler = sampler(1001, 10, seed);
        (epoch * 100..(epoch + 1) * 100).map(|number| sampler.window(number)).collect()
    };
    let orders = [order(0, 0), order(0, 1), order(0, 2), order(1, 0), order(2, 0)];
    for (at, one) in orders.iter().enumerate() {
        assert!(!one.is_sorted());
        assert!(orders[..at].iter().all(|other| other != one), "{at}");
    }
    assert_eq!(order(7, 3), order(7, 3));
}

/// The microbatches of all replicas of any mesh read together each token of the step once, in order.
#[test]
fn a_step_has_the_same_tokens_on_every_mesh() {
    arbtest::arbtest(|u| {
        let (data, micro_batch, microbatches) =
            (u.int_in_range(1..=4)?, u.int_in_range(1..=3)?, u.int_in_range(1..=3)?);
        let (tensor, pipeline) = (u.int_in_range(1..=4)?, u.int_in_range(1..=4)?);
        let mesh = Mesh { tensor, pipeline, data, context: u.int_in_range(1..=3)? };
        let length = 6 * mesh.context;
        let global_batch = data * micro_batch * microbatches;
        let workload = Workload { global_batch, sequence_length: length, micro_batch };
        let sampler = sampler(u.int_in_range(length + 1..=300)?, length, u.arbitrary()?);
        let step_first = u.int_in_range(0..=100_u64)? * global_batch;
        let (whole, whole_targets) =
            sequence(&sampler, step_first, (global_batch * length) as usize);
        let context_attention = *u.choose(&ContextAttention::ALL)?;
        let context = Context::new(mesh, workload, Precision::Fp32, Zero::Off);
        let context = Context { context_attention, ..context };
        let (mut inputs, mut targets) = (vec![], vec![]);
        for part in 0..data {
            for microbatch in 0..workload.microbatches(&mesh) {
                // Of each sequence, the devices of the context axis have all positions once.
                let ranges = (0..mesh.context).flat_map(|place| {
                    let replica = part * mesh.context + place;
                    let coordinates = MeshCoordinates { tensor: 0, replica, stage: 0 };
                    let rows = TokenRows::of_device(&context, &coordinates, context.tokens());
                    rows.id_ranges(&context, &coordinates, microbatch)
                });
                let mut ranges: Vec<_> = ranges.collect();
                ranges.sort_by_key(|ids| ids.start);
                for ids in ranges {
                    inputs.extend(&whole[ids.clone()]);
                    targets.extend(&whole_targets[ids]);
                }
            }
        }
        assert_eq!((inputs, targets), (whole, whole_targets));
        Ok(())
    })
    .budget_ms(500);
}

#[test]
fn a_cursor_resumes_where_the_run_stopped() {
    let run = sampler(500, 7, 3);
    let text = serde_json::to_string(&run.cursor(123)).unwrap();
    let sha256 = hex::encode(run.file().fingerprint().unwrap());
    assert_eq!(
        text,
        format!(
            r#"{{"next_sequence":123,"seed":3,"sequence_length":7,"tokens_sha256":"{sha256}"}}"#
        )
    );
    let cursor: Cursor = serde_json::from_str(&text).unwrap();
    let resumed = sampler(500, 7, 3);
    let next = resumed.sequence_to_resume(&cursor).unwrap();
    assert_eq!(sequence(&run, 123, 70), sequence(&resumed, next, 70));
    for (other, message) in [
        (sampler(500, 7, 4), "seed 3, and this run has 4"),
        (sampler(500, 8, 3), "sequences of length 7, and this run has 8"),
        (sampler(501, 7, 3), "tokens with SHA-256 "),
    ] {
        let error = other.sequence_to_resume(&cursor).unwrap_err().to_string();
        assert!(error.contains(message), "{message}: {error}");
    }
    let targets = TargetRule { last: LastTarget::Ignored, pad_id: None };
    let error = run.sequence_to_resume(&Cursor { targets, ..cursor }).unwrap_err().to_string();
    let message = "the cursor is for a run with targets for every input but the last, and this run has targets for every input";
    assert!(error.ends_with(message), "{error}");
}

#[test]
fn too_few_tokens_and_larger_vocabularies_are_rejected() {
    let rejection = |file: Arc<TokenFile>, sequence_length, vocabulary| {
        let config =
            SamplerConfig { sequence_length, vocabulary, seed: 0, targets: TargetRule::default() };
        let error = Sampler::new(file, config).unwrap_err();
        (error.to_string(), error.fault.hint().unwrap())
    };
    let (text, hint) = rejection(counting_file(10), 10, 1 << 20);
    assert!(text.contains("has 10 tokens, too few for one sequence of 10"), "{text}");
    assert!(hint.contains("at most 9 tokens"), "{hint}");
    let (text, _) = rejection(counting_file(0), 1, 1 << 20);
    assert!(text.contains("has 0 tokens"), "{text}");
    let (text, _) = rejection(counting_file(10), 0, 1 << 20);
    assert!(text.contains("sequences of length 0"), "{text}");
    let (text, _) = rejection(counting_file(10), 2, 1000);
    assert!(text.contains("vocabulary of 1048576, and the model has 1000"), "{text}");

    // llm.c's files have no vocabulary size: the token itself is rejected.
    let file = Arc::new(open_bytes(llm_c(20_240_520, 1, 3, &[1, 0, 2, 0, 9, 0])).unwrap());
    let config = SamplerConfig {
        sequence_length: 2,
        vocabulary: 9,
        seed: 0,
        targets: TargetRule::default(),
    };
    let sampler = Sampler::new(file, config).unwrap();
    let error = sampler.fill(0, &mut [0; 2], &mut [0; 2]).unwrap_err();
    assert!(error.to_string().contains("byte 1028 (token 2): id 9 is not below"), "{error}");
}
