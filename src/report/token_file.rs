//! Reports on new and on inspected token files.

use std::path::Path;

use narrows_plan::Bytes;
use narrows_runtime::Sha256Digest;
use narrows_runtime::data::{TokenFileHeader, TokenFileLayout};
use serde::{Serialize, Serializer};

use super::Report;
use super::page::Page;
use crate::args::Detail;
use crate::corpus::DocumentLayout;
use crate::text::{plural, thousands};

/// Output of `data --inspect`.
#[derive(Serialize)]
pub struct TokenFileReport {
    file: String,
    #[serde(serialize_with = "layout_name")]
    layout: TokenFileLayout,
    token_count: u64,
    token_width_bytes: u64,
    file_bytes: u64,
    /// `null` where the header has none.
    vocabulary_size: Option<u32>,
    end_of_text_id: Option<u32>,
    tokenizer: Option<TokenizerReport>,
    /// SHA-256 of the tokens; `null` where the header has none.
    tokens_sha256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<VerificationReport>,
}

fn layout_name<S: Serializer>(layout: &TokenFileLayout, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(layout.name())
}

#[derive(Serialize)]
struct TokenizerReport {
    name: String,
    /// SHA-256 of its file; `null` for bytes.
    sha256: Option<String>,
}

/// The result of reading the whole file.
#[derive(Serialize)]
struct VerificationReport {
    /// `null` where the header has none.
    checksum: Option<bool>,
    largest_id: Option<u32>,
}

/// Output of `data` for a new token file.
#[derive(Serialize)]
pub struct NewTokenFileReport {
    #[serde(flatten)]
    contents: TokenFileReport,
    document_count: u64,
    /// The token between or after documents; `null` without one.
    document_separator: Option<&'static str>,
    /// Whether it follows every document.
    #[serde(skip)]
    separator_follows: bool,
    /// Tokens of each document where all are cut or padded to one length; `null` where documents are packed.
    document_tokens: Option<u64>,
    /// The inputs, in order.
    inputs: Vec<InputReport>,
    text_bytes: u64,
    /// `null` where inputs have tokens.
    bytes_per_token: Option<f64>,
}

/// An input of a token file.
#[derive(Serialize)]
struct InputReport {
    /// The name as typed.
    name: String,
    /// Tokens of the input in the file, with separators and padding.
    tokens: u64,
}

impl TokenFileReport {
    /// The report on a file with this header.
    pub fn new(file: &Path, header: &TokenFileHeader) -> TokenFileReport {
        let tokenizer = header.tokenizer.as_ref().map(|tokenizer| TokenizerReport {
            name: tokenizer.name.clone(),
            sha256: (tokenizer.fingerprint != Sha256Digest::default())
                .then(|| hex::encode(tokenizer.fingerprint)),
        });
        TokenFileReport {
            file: file.display().to_string(),
            layout: header.layout,
            token_count: header.token_count,
            token_width_bytes: header.width.bytes(),
            file_bytes: header.file_bytes().unwrap_or(u64::MAX),
            vocabulary_size: header.vocabulary,
            end_of_text_id: header.end_of_text,
            tokenizer,
            tokens_sha256: header.checksum.map(hex::encode),
            verified: None,
        }
    }

    /// Adds the result of verifying the whole file.
    pub fn verified(mut self, largest_id: Option<u32>) -> TokenFileReport {
        let checksum = self.tokens_sha256.is_some().then_some(true);
        self.verified = Some(VerificationReport { checksum, largest_id });
        self
    }
}

impl Report for TokenFileReport {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        page.heading(&self.file);
        let mut fields = self.fields();
        fields.push(("layout", self.layout.name().into()));
        let documents = match self.end_of_text_id {
            Some(id) => format!("end-of-text token {id} between them"),
            None if self.layout == TokenFileLayout::Narrows => "no token between them".into(),
            None => "the header does not say which token is between them".into(),
        };
        fields.push(("documents", documents));
        fields.push(("SHA-256", self.tokens_sha256.clone().unwrap_or("not in the header".into())));
        if let Some(verified) = &self.verified {
            let checksum = if verified.checksum.is_some() { "checksum" } else { "length" };
            let ids = match verified.largest_id {
                Some(id) => format!("all token ids, the largest of which is {id}"),
                None => "no token ids".into(),
            };
            fields.push(("verified", format!("{checksum} and {ids}")));
        }
        page.fields(&fields);
        page
    }
}

impl TokenFileReport {
    fn fields(&self) -> Vec<(&'static str, String)> {
        let TokenFileReport { token_count, token_width_bytes, .. } = self;
        let size = Bytes(self.file_bytes);
        let tokens = thousands(*token_count);
        let vocabulary = match (&self.vocabulary_size, &self.tokenizer) {
            (Some(size), Some(tokenizer)) => {
                format!("{} ids, {}", thousands((*size).into()), tokenizer.name)
            }
            (Some(size), None) => format!("{} ids", thousands((*size).into())),
            (None, _) => "not in the header".into(),
        };
        vec![
            ("tokens", format!("{tokens} of {token_width_bytes} bytes each; file size {size}")),
            ("vocabulary", vocabulary),
        ]
    }
}

impl NewTokenFileReport {
    /// The report on a file made from documents, of whose texts the size is given with whether all of them were texts.
    pub fn new(
        contents: TokenFileReport,
        document_count: u64,
        (text_bytes, all_texts): (u64, bool),
        (layout, end_of_text): (DocumentLayout, Option<&'static str>),
        inputs: Vec<(String, u64)>,
    ) -> NewTokenFileReport {
        let document_tokens = match layout {
            DocumentLayout::Separated(_) | DocumentLayout::Ended(_) => None,
            DocumentLayout::Padded { length, .. } => Some(length),
        };
        let bytes_per_token =
            all_texts.then(|| text_bytes as f64 / contents.token_count.max(1) as f64);
        NewTokenFileReport {
            contents,
            document_count,
            document_separator: end_of_text.filter(|_| layout.separator().is_some()),
            separator_follows: matches!(layout, DocumentLayout::Ended(_)),
            document_tokens,
            inputs: inputs.into_iter().map(|(name, tokens)| InputReport { name, tokens }).collect(),
            text_bytes,
            bytes_per_token,
        }
    }
}

impl Report for NewTokenFileReport {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        page.heading(&self.contents.file);
        let documents = match (self.document_count, self.document_separator) {
            (1, _) => "1 document".into(),
            (count, _) if self.document_tokens.is_some() => plural(count, "document"),
            (count, Some(name)) if self.separator_follows => {
                format!("{}, `{name}` after each", plural(count, "document"))
            }
            (count, Some(name)) => format!("{}, `{name}` between them", plural(count, "document")),
            (count, None) => {
                format!("{}, joined without an end-of-text token", plural(count, "document"))
            }
        };
        let bytes = plural(self.text_bytes, "byte");
        let text = match self.bytes_per_token {
            Some(per_token) => ("text", format!("{bytes}, {per_token:.2} per token; {documents}")),
            None if self.text_bytes > 0 => ("text", format!("{bytes} and tokens; {documents}")),
            None => ("documents", documents),
        };
        let mut fields = self.contents.fields();
        fields.insert(0, text);
        if let Some(tokens) = self.document_tokens {
            fields.push(("length", format!("cut or padded to {} each", plural(tokens, "token"))));
        }
        let all = self.contents.token_count.max(1) as f64;
        for InputReport { name, tokens } in self.inputs.iter().filter(|_| self.inputs.len() > 1) {
            let share = 100.0 * *tokens as f64 / all;
            let tokens = plural(*tokens, "token");
            fields.push(("input", format!("{tokens}, {share:.1} %, of {name}")));
        }
        page.fields(&fields);
        page
    }
}
