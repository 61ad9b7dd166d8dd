//! Tokenizers from a Hugging Face `tokenizer.json`.

use std::path::{Component, Path};

use narrows_runtime::data::{TokenFileInfo, TokenizerId};
use narrows_runtime::sha256;
use tokenizers::{ModelWrapper, Tokenizer};

use crate::errors::{CommandResult, Failure, Problem};
use crate::library_panic::catch_panic;

/// Names of the end-of-text token, which a tokenizer file does not label: the first one in the vocabulary is used.
const END_OF_TEXT: [&str; 7] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eos|>",
    "<eos>",
    "</s>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
];

/// A tokenizer.
#[derive(Debug)]
pub struct HuggingFace {
    tokenizer: Tokenizer,
    description: TokenFileInfo,
    end_of_text: Option<&'static str>,
}

impl HuggingFace {
    /// Reads the text of a `tokenizer.json`.
    pub fn read(name: &str, text: &str) -> CommandResult<HuggingFace> {
        let rejected = |message: String| {
            let hint = "a tokenizer.json written by Hugging Face's tokenizers";
            Failure::input(Problem::new(name, message).hint(hint))
        };
        let read =
            catch_panic("the tokenizer", || Tokenizer::from_bytes(text)).map_err(rejected)?;
        let mut tokenizer =
            read.map_err(|error| rejected(format!("is not a tokenizer: {error}")))?;
        if let ModelWrapper::BPE(model) = tokenizer.get_model()
            && model.dropout.is_some_and(|dropout| dropout > 0.0)
        {
            let problem =
                Problem::new(name, "merges at random, so runs would get different tokens");
            let problem = problem.field("model.dropout").hint("\"dropout\": null");
            return Err(Failure::input(problem));
        }
        // Both are for batches of sentences; a text is neither truncated nor padded.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| rejected(error.to_string()))?;
        let largest = tokenizer.get_vocab(true).into_values().max();
        let vocabulary = largest.map_or(Some(0), |id| id.checked_add(1)).unwrap_or(0);
        if vocabulary == 0 {
            let message = match largest {
                Some(id) => format!("has a token with id {id}, which is too large"),
                None => "has no tokens".into(),
            };
            return Err(rejected(message));
        }
        let end_of_text =
            END_OF_TEXT.into_iter().find(|name| tokenizer.token_to_id(name).is_some());
        let description = TokenFileInfo {
            vocabulary,
            end_of_text: end_of_text.and_then(|name| tokenizer.token_to_id(name)),
            tokenizer: TokenizerId { name: short_name(name), fingerprint: sha256(text.as_bytes()) },
        };
        Ok(HuggingFace { tokenizer, description, end_of_text })
    }

    /// Vocabulary and name, as a token file states them.
    pub fn description(&self) -> &TokenFileInfo {
        &self.description
    }

    /// The text of the token between documents, if there is one.
    pub fn end_of_text(&self) -> Option<&'static str> {
        self.end_of_text
    }

    /// The tokens of each text, without special tokens at its start or end.
    ///
    /// # Errors
    /// The message of the tokenizer, after its name.
    pub fn encode(&self, texts: Vec<String>) -> Result<Vec<Vec<u32>>, String> {
        let encoded = self.call(|| self.tokenizer.encode_batch_fast(texts, false))?;
        Ok(encoded.into_iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }

    /// The text of tokens, with special tokens spelled out.
    ///
    /// # Errors
    /// The message of the tokenizer, after its name.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, String> {
        self.call(|| self.tokenizer.decode(tokens, false))
    }

    /// Calls the library. Its messages do not name the tokenizer.
    fn call<T>(&self, task: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
        catch_panic("the tokenizer", task)
            .and_then(|result| result.map_err(|error| error.to_string()))
            .map_err(|message| format!("{}: {message}", self.description.tokenizer.name))
    }
}

/// The last two components of a path: the folder names the model, and the rest is private.
fn short_name(path: &str) -> String {
    let parts: Vec<String> = Path::new(path)
        .components()
        .filter_map(|part| match part {
            Component::Normal(part) => Some(part.to_string_lossy().into_owned()),
            _ => None,
        })
        .collect();
    parts[parts.len().saturating_sub(2)..].join("/")
}

#[cfg(test)]
mod tests {
    use tokenizers::models::TrainerWrapper;
    use tokenizers::models::bpe::{BPE, BpeTrainer};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::pre_tokenizers::sequence::Sequence;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

    use super::super::chunks::TextChunks;
    use super::*;

    /// The published rules of LLaMA 3.
    const LLAMA3_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    const TEXT: &str = include_str!("../../data/moby-dick.txt");

    /// Trains a tokenizer on the beginning of a book, with additional runs of blanks and of line ends.
    fn train(words: PreTokenizerWrapper) -> HuggingFace {
        let mut tokenizer = Tokenizer::new(BPE::default());
        tokenizer.with_pre_tokenizer(Some(words));
        let mut trainer = TrainerWrapper::from(
            BpeTrainer::builder()
                .vocab_size(600)
                .show_progress(false)
                .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
                .build(),
        );
        let blanks =
            ["a\n\nb", "a\n\n\nb", "a.\n\nb", "a  b", "a \n b", "a\r\n\r\nb", "a\r\n b", "a\r\n c"]
                .repeat(3000);
        let texts =
            TEXT[..100_000].lines().map(str::to_owned).chain(blanks.into_iter().map(str::to_owned));
        tokenizer.train(&mut trainer, texts).unwrap();
        // Chunks that end within words would split these tokens.
        for blanks in ["ĊĊ", "čĊ", "ĠĊ"] {
            assert!(tokenizer.token_to_id(blanks).is_some(), "{blanks}");
        }
        HuggingFace::read("trained.json", &tokenizer.to_string(false).unwrap()).unwrap()
    }

    fn tokenizers() -> [HuggingFace; 2] {
        let words = SplitPattern::Regex(LLAMA3_WORDS.into());
        let split = Split::new(words, SplitDelimiterBehavior::Isolated, false).unwrap();
        let llama3 = Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()]);
        [train(ByteLevel::new(false, true, true).into()), train(llama3.into())]
    }

    fn in_chunks(tokenizer: &HuggingFace, text: &str, chunk_bytes: usize) -> Vec<u32> {
        let mut chunks = TextChunks::with_sizes(text.as_bytes(), chunk_bytes, usize::MAX / 2);
        let mut texts = vec![];
        while let Some(chunk) = chunks.next_chunk().unwrap() {
            texts.push(chunk);
        }
        tokenizer.encode(texts).unwrap().concat()
    }

    #[test]
    fn chunks_have_the_tokens_of_the_whole_text() {
        let tokenizers = tokenizers();
        let whole = |tokenizer: &HuggingFace, text: &str| {
            tokenizer.encode(vec![text.to_owned()]).unwrap().concat()
        };
        for tokenizer in &tokenizers {
            let text = &TEXT[..60_000];
            assert_eq!(in_chunks(tokenizer, text, 500), whole(tokenizer, text));
            let dos = text.replace('\n', "\r\n");
            assert_eq!(in_chunks(tokenizer, &dos, 500), whole(tokenizer, &dos));
        }
        let parts = ["a", "whale", " ", "  ", "\n", "\n\n", "\r\n", ".", "'s", "é", "7", "—", "\t"];
        arbtest::arbtest(|u| {
            let mut text = String::new();
            for _ in 0..u.int_in_range(0..=40)? {
                text.push_str(u.choose(&parts)?);
            }
            let chunk_bytes = u.int_in_range(4..=30)?;
            for tokenizer in &tokenizers {
                let tokens = in_chunks(tokenizer, &text, chunk_bytes);
                assert_eq!(tokens, whole(tokenizer, &text), "{text:?} by {chunk_bytes}");
            }
            Ok(())
        })
        .budget_ms(400);
    }

    /// A damaged tokenizer.json is rejected, or tokenizes or rejects a text.
    #[test]
    fn damaged_tokenizers_never_panic() {
        let seed = r###"{"version": "1.0", "added_tokens": [{"id": 3, "content": "</s>",
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true}], "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first",
            "split": true}, "post_processor": null, "decoder": null, "model": {"type": "BPE",
            "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": "é",
            "end_of_word_suffix": "", "fuse_unk": true, "byte_fallback": true,
            "vocab": {"<unk>": 0, "a": 1, "b": 2, "éb": 4, "aéb": 5, "ab": 6},
            "merges": ["a éb"]}}"###;
        HuggingFace::read("seed", seed).unwrap();
        let words = ["null", "true", "0", "-1", "4294967295", "\"BPE\"", "\"Unigram\"", "{}", "[]"];
        arbtest::arbtest(|u| {
            let mut bytes = seed.as_bytes().to_vec();
            for _ in 0..u.int_in_range(1..=3)? {
                let at = u.choose_index(bytes.len())?;
                match u.int_in_range(0..=3)? {
                    0 => bytes[at] = u.arbitrary()?,
                    1 => drop(bytes.drain(at..(at + 3).min(bytes.len()))),
                    2 => bytes.insert(at, *u.choose(b"{}[]\",:09ab")?),
                    _ => {
                        let word = u.choose(&words)?.bytes();
                        bytes.splice(at..(at + 4).min(bytes.len()), word);
                    }
                }
            }
            if let Ok(tokenizer) = HuggingFace::read("fuzz", &String::from_utf8_lossy(&bytes)) {
                let _ = tokenizer.encode(vec!["abba ébé\n".into()]);
            }
            Ok(())
        })
        .budget_ms(500);
    }

    #[test]
    fn names_hold_the_model_and_not_the_path() {
        assert_eq!(short_name("/somewhere/models/llama/tokenizer.json"), "llama/tokenizer.json");
        assert_eq!(short_name("../tokenizer.json"), "tokenizer.json");
    }
}
