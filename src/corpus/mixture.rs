//! Documents of several corpora, interleaved by weights.
//!
//! The next document is always of the corpus whose tokens so far are fewest for its weight, of equal ones the
//! first, so that at every place of the file the corpora have their shares, up to one document each. The file ends
//! when that corpus has no further document.

use crate::errors::{CommandResult, Failure};

use super::document_writer::DocumentWriter;
use super::source::CorpusReader;

/// Tokens of a corpus in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CorpusTokens {
    /// With separators and padding.
    pub all: u64,
    /// Those of its documents alone.
    pub of_documents: u64,
}

/// Writes the documents of all corpora: interleaved, or without weights one corpus after the other. Returns the number of
/// tokens of each corpus.
///
/// # Errors
/// A file that cannot be read or tokenized, and a token file that cannot be written.
pub fn write_mixture(
    readers: &mut [CorpusReader],
    weights: Option<&[f64]>,
    writer: &mut DocumentWriter,
) -> CommandResult<Vec<CorpusTokens>> {
    let mut tokens = vec![CorpusTokens::default(); readers.len()];
    let mut write = |index: usize, tokens: &mut [CorpusTokens]| {
        let before = (writer.token_count(), writer.document_tokens());
        let written = readers[index].write_document(writer)?;
        tokens[index].all += writer.token_count() - before.0;
        tokens[index].of_documents += writer.document_tokens() - before.1;
        Ok::<_, Failure>(written)
    };
    match weights {
        None => {
            for index in 0..tokens.len() {
                while write(index, &mut tokens)? {}
            }
        }
        Some(weights) => while write(next_corpus(&tokens, weights), &mut tokens)? {},
    }
    Ok(tokens)
}

/// The corpus with the fewest tokens for its weight.
fn next_corpus(tokens: &[CorpusTokens], weights: &[f64]) -> usize {
    let share = |index: usize| tokens[index].all as f64 / weights[index];
    (1..tokens.len())
        .fold(0, |least, index| if share(index) < share(least) { index } else { least })
}

#[cfg(test)]
mod tests {
    use super::{CorpusTokens, next_corpus};

    #[test]
    fn shares_follow_the_weights() {
        let (weights, sizes) = ([3.0, 1.0, 0.5], [100, 7, 900]);
        let mut tokens = [CorpusTokens::default(); 3];
        for _ in 0..5000 {
            let next = next_corpus(&tokens, &weights);
            tokens[next].all += sizes[next];
        }
        let total: u64 = tokens.iter().map(|tokens| tokens.all).sum();
        for (tokens, weight) in tokens.iter().zip(weights) {
            let (share, expected) = (tokens.all as f64 / total as f64, weight / 4.5);
            assert!((share - expected).abs() < 0.01, "{share} and {expected}");
        }
    }
}
