//! `run --tensorboard`: event files.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::run::{SMALL, lines};
use super::{failure, stdout};

/// Scalars of the event files of a folder by step and tag, as a reader of TensorBoard keeps them: a file that starts at a
/// step replaces the events of earlier files from there on.
fn scalars(folder: &Path) -> BTreeMap<u64, BTreeMap<String, f32>> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let mut scalars = BTreeMap::<u64, BTreeMap<String, f32>>::new();
    for file in files {
        let bytes = fs::read(file).unwrap();
        let mut rest = &bytes[..];
        while let Some((length, data)) = rest.split_first_chunk::<8>() {
            let length = u64::from_le_bytes(*length) as usize;
            let event = fields(&data[4..4 + length]);
            rest = &data[8 + length..];
            let step = event.get(&2).map_or(0, |step| step[0].number);
            if event.contains_key(&7) {
                scalars.split_off(&step);
            }
            for summary in event.get(&5).into_iter().flatten() {
                for value in &fields(summary.bytes)[&1] {
                    let value = fields(value.bytes);
                    let tag = String::from_utf8(value[&1][0].bytes.to_vec()).unwrap();
                    let number = f32::from_bits(value[&2][0].number as u32);
                    scalars.entry(step).or_default().insert(tag, number);
                }
            }
        }
    }
    scalars
}

/// A field of a protocol buffer: its bytes, or the number that it is.
#[derive(Default)]
struct Field<'a> {
    bytes: &'a [u8],
    number: u64,
}

fn fields(mut rest: &[u8]) -> BTreeMap<u64, Vec<Field<'_>>> {
    let mut fields = BTreeMap::<_, Vec<_>>::new();
    while !rest.is_empty() {
        let key = varint(&mut rest);
        let mut field = Field::default();
        let length = match key & 7 {
            0 => {
                field.number = varint(&mut rest);
                0
            }
            1 => 8,
            5 => 4,
            _ => varint(&mut rest) as usize,
        };
        (field.bytes, rest) = rest.split_at(length);
        if key & 7 == 5 {
            field.number = u32::from_le_bytes(field.bytes.try_into().unwrap()).into();
        }
        fields.entry(key >> 3).or_default().push(field);
    }
    fields
}

fn varint(rest: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (byte, others) = rest.split_first().unwrap();
        *rest = others;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

/// A run that resumes from before its last step continues at the step of its checkpoint, in a new file.
#[test]
fn event_files_have_the_values_of_the_metrics_also_after_a_run_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("eval.txt"), "Some years ago - never mind how long precisely.").unwrap();
    stdout(&format!("data {} --output {}", at("eval.txt").display(), at("eval").display()));
    let run = format!(
        "{SMALL} --checkpoint-dir {} --metrics {} --tensorboard {} --eval-data {} --eval-every 2",
        at("kept").display(),
        at("m.jsonl").display(),
        at("board").display(),
        at("eval").display()
    );
    stdout(&format!("{run} --steps 4 --decay-steps 6 --checkpoint-every 3"));
    fs::remove_dir_all(at("kept/step-00000004")).unwrap();
    stdout(&format!("{run} --steps 6 --resume"));
    assert_eq!(fs::read_dir(at("board")).unwrap().count(), 2);
    let scalars = scalars(&at("board"));
    let lines = lines(&at("m.jsonl"));
    assert_eq!(scalars.keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    for (line, (step, values)) in lines.iter().zip(&scalars) {
        let keys = [
            ("train/loss", "loss"),
            ("train/learning_rate", "learning_rate"),
            ("train/grad_norm", "grad_norm"),
            ("time/tokens_per_s", "tokens_per_s"),
            ("time/step_time_s", "step_time_s"),
            ("time/predicted_step_time_s", "predicted_step_time_s"),
            ("eval/loss", "eval_loss"),
        ];
        for (tag, key) in keys {
            let expected = line[key].as_f64().map(|value| value as f32);
            assert_eq!(values.get(tag).copied(), expected, "{tag} of step {step}");
        }
        assert_eq!(values.contains_key("eval/loss"), step.is_multiple_of(2));
    }
}

#[test]
fn the_folder_of_another_run_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let run = format!("{SMALL} --steps 1 --tensorboard {}", at("board"));
    fs::create_dir(at("board")).unwrap();
    fs::write(at("board/notes.txt"), "no events").unwrap();
    stdout(&run);
    let metrics = at("metrics.jsonl");
    fs::write(&metrics, "kept").unwrap();
    let message = failure(&format!("{run} --metrics {metrics}"), 2);
    assert_eq!(fs::read_to_string(&metrics).unwrap(), "kept");
    for part in ["board: already holds event files of a run", "another --tensorboard", "--resume"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(fs::read_dir(at("board")).unwrap().count(), 2);
    // A run that ended before its first checkpoint begins again.
    stdout(&format!("{run} --checkpoint-dir {} --resume", at("kept")));
    assert_eq!(fs::read_dir(at("board")).unwrap().count(), 3);
}

#[test]
fn a_folder_that_cannot_be_written_ends_a_run_before_its_first_step() {
    let message = failure(&format!("{SMALL} --steps 1 --tensorboard README.md"), 2);
    assert!(message.contains("README.md: cannot be written"), "{message}");
    let message = failure("run --backend null --tensorboard board", 2);
    assert!(message.contains("--tensorboard: the null backend computes nothing"), "{message}");
}
