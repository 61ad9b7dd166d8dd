//! `narrows generate`: continues a text with the weights of a checkpoint.

use narrows_cpu::CachedModel;
use narrows_cpu::kernels::Parallel;
use narrows_plan::Bytes;
use narrows_plan::model::Model;
use narrows_runtime::data::{TokenFileInfo, TokenizerId};

use crate::args::{GenerateArgs, GenerateSettings, OutputFormat};
use crate::errors::{CommandResult, Failure, Problem};
use crate::generate::{GenerateError, GenerationLimits, TextStream, generate};
use crate::host::{available_memory, cores};
use crate::output;
use crate::report::GenerationReport;
use crate::text::{plural, thousands};
use crate::tokenize::Tokenizer;

/// Reason for an end before the last token.
enum Interruption {
    /// The pipe of the text was closed, as `head` does.
    NoReader,
    /// The text cannot be made or printed.
    Failed(Failure),
}

impl From<Failure> for Interruption {
    fn from(failure: Failure) -> Interruption {
        Interruption::Failed(failure)
    }
}

/// Continues the text, and prints it as it comes.
pub fn run(args: &GenerateArgs) -> CommandResult<()> {
    let settings = args.resolve()?;
    let GenerateSettings { weights, model, tokenizer, prompt, choice, .. } = &settings;
    let prompt_tokens = prompt_tokens(prompt, tokenizer, model)?;
    let positions = usize::try_from(model.max_sequence_length).unwrap_or(usize::MAX);
    let limits = GenerationLimits {
        tokens: settings.tokens as usize,
        positions: positions.min(prompt_tokens.len() + settings.tokens as usize),
        end_of_text: tokenizer.description().end_of_text,
    };
    require_constant_frequencies(model, limits.positions as u64)?;
    require_memory(model, limits.positions)?;
    let parallel = Parallel::new(cores() as usize);
    let mut cached = CachedModel::new(model, weights.read(model)?, limits.positions, parallel);
    let mut stream = TextStream::new(tokenizer, &prompt_tokens);
    let mut text = String::new();
    let mut print = |part: Result<String, String>| {
        let part = part.map_err(|message| Failure::input(Problem::new("--tokenizer", message)))?;
        text.push_str(&part);
        match args.format.format {
            OutputFormat::Text if !output::print_to_reader(&printable(&part))? => {
                Err(Interruption::NoReader)
            }
            _ => Ok(()),
        }
    };
    if args.format.format == OutputFormat::Text && !output::print_to_reader(prompt)? {
        return Ok(());
    }
    let emit = |token| print(stream.push(token));
    let generated = generate(&mut cached, &prompt_tokens, limits, choice, emit);
    let generated = generated.map_err(interruption);
    let generation = match generated.and_then(|all| print(stream.finish()).map(|()| all)) {
        Ok(generation) => generation,
        Err(Interruption::NoReader) => return Ok(()),
        Err(Interruption::Failed(failure)) => return Err(failure),
    };
    warn_of_unknown_tokens(&generation.tokens, tokenizer, model);
    let report = GenerationReport::new(&settings, prompt_tokens, text, &generation);
    match args.format.format {
        OutputFormat::Json => output::print_json(&report),
        OutputFormat::Text => {
            output::print("\n")?;
            output::eprint(&report.summary());
            Ok(())
        }
    }
}

/// The tokens of a prompt, of which there is at least one, and all within the model's vocabulary and positions.
fn prompt_tokens(prompt: &str, tokenizer: &Tokenizer, model: &Model) -> CommandResult<Vec<u32>> {
    let invalid =
        |message: String, hint: &str| Failure::input(Problem::new("--prompt", message).hint(hint));
    let tokens = tokenizer.encode(vec![prompt.to_owned()]);
    let mut tokens = tokens.map_err(|message| invalid(message, "another --tokenizer"))?.concat();
    let name = tokenizer.description().tokenizer.name;
    if tokens.is_empty() && !prompt.trim().is_empty() {
        let message = format!("has no tokens: the tokenizer {name} knows none of its characters");
        return Err(invalid(message, "--tokenizer, the tokenizer of the training data"));
    }
    if tokens.is_empty() {
        // As at the beginning of a document in the training data.
        tokens.extend(tokenizer.description().end_of_text);
    }
    if tokens.is_empty() {
        let message = "is empty, and the tokenizer has no end-of-text token to start from";
        return Err(invalid(message.into(), "a text"));
    }
    if let Some(token) = tokens.iter().find(|token| u64::from(**token) >= model.vocab) {
        let message = format!(
            "contains token {token} of the tokenizer {name}, but the vocabulary of {} has {} tokens",
            model.name, model.vocab
        );
        return Err(invalid(message, "--tokenizer, the tokenizer of the training data"));
    }
    if tokens.len() as u64 >= model.max_sequence_length {
        let (count, longest) = (tokens.len(), model.max_sequence_length);
        let message = format!("has {count} tokens, but {} has {longest} positions", model.name);
        let problem = Problem::new("--prompt", message)
            .hint("a shorter text, which leaves a position for a new token")
            .hint("the right `max_sequence_length` in the model's file, model.json or config.json");
        return Err(Failure::input(problem));
    }
    Ok(tokens)
}

/// Warns of new tokens that the tokenizer does not have, and which have no text therefore.
fn warn_of_unknown_tokens(tokens: &[u32], tokenizer: &Tokenizer, model: &Model) {
    let TokenFileInfo { vocabulary, tokenizer: TokenizerId { name, .. }, .. } =
        tokenizer.description();
    let unknown = tokens.iter().filter(|token| **token >= vocabulary).count();
    if unknown > 0 {
        let (unknown, all) = (thousands(unknown as u64), plural(tokens.len() as u64, "new token"));
        output::warn(&format!(
            "--tokenizer: {unknown} of {all} are not in the tokenizer {name}, which has {}, and {} has {}: they have no \
             text. --tokenizer with the tokenizer of the training data shows them",
            plural(vocabulary.into(), "token"),
            model.name,
            model.vocab
        ));
    }
}

/// Checks that RoPE has the same frequencies at all lengths of the text: cached keys keep those that they were rotated by.
fn require_constant_frequencies(model: &Model, positions: u64) -> CommandResult<()> {
    match model.rope.length_of_change().filter(|length| positions > *length) {
        None => Ok(()),
        Some(length) => {
            let message = format!(
                "gives {positions} tokens, but {} changes its RoPE frequencies above {length} tokens, and keys already cached keep the old ones",
                model.name
            );
            let hint = format!("fewer tokens, with the prompt at most {length}");
            Err(Failure::input(Problem::new("--tokens", message).hint(hint)))
        }
    }
}

/// Checks that the machine has the memory for weights, keys and values. The system would end the program without a message.
fn require_memory(model: &Model, positions: usize) -> CommandResult<()> {
    let cached = 2 * model.blocks.len() as u64 * model.kv_heads * model.head_dim;
    let elements = model.parameters() + cached * positions as u64;
    let needed = Bytes(elements * size_of::<f32>() as u64);
    match available_memory().filter(|available| needed > *available) {
        None => Ok(()),
        Some(available) => {
            let message = format!("{} needs {needed}, and {available} are free", model.name);
            Err(Failure::failed(vec![
                Problem::new("memory", message).hint("a machine with more memory"),
            ]))
        }
    }
}

fn interruption(error: GenerateError<Interruption>) -> Interruption {
    Interruption::Failed(match error {
        GenerateError::Output(interruption) => return interruption,
        GenerateError::Prompt(error) => Failure::input(Problem::new("--prompt", error.to_string())),
        GenerateError::NotFinite => {
            let problem = Problem::new("CHECKPOINT", "the logits of the model are not finite");
            Failure::failed(vec![problem.hint("a checkpoint of an earlier step")])
        }
    })
}

/// Text without the control characters that a terminal would obey.
fn printable(text: &str) -> String {
    let is_obeyed = |c: char| c.is_control() && !matches!(c, '\n' | '\t' | '\r');
    text.replace(is_obeyed, "\u{fffd}")
}
