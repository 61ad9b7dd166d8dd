//! What a token file holds, and what it was made of.

use std::path::Path;

use narrows_plan::Bytes;
use narrows_runtime::Sha256Digest;
use narrows_runtime::data::{TokenFileHeader, TokenFileLayout};
use serde::Serialize;

use super::page::{TextPage, plural, thousands};

/// What a token file says of itself; its JSON form is what `data --inspect --format json` prints.
#[derive(Serialize)]
pub struct TokenFileReport {
    file: String,
    layout: &'static str,
    token_count: u64,
    token_width_bytes: u64,
    file_bytes: u64,
    /// `null` where the file does not say.
    vocabulary_size: Option<u32>,
    end_of_text_id: Option<u32>,
    tokenizer: Option<TokenizerReport>,
    /// Of the tokens; `null` where the file does not say.
    tokens_sha256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<VerificationReport>,
}

#[derive(Serialize)]
struct TokenizerReport {
    name: String,
    /// Of its file; `null` for bytes.
    sha256: Option<String>,
}

/// What was found by reading all of it.
#[derive(Serialize)]
struct VerificationReport {
    /// `null` where there is none.
    checksum: Option<bool>,
    largest_id: Option<u32>,
}

/// A token file that was made; its JSON form is what `data --format json` prints.
#[derive(Serialize)]
pub struct NewTokenFileReport {
    #[serde(flatten)]
    contents: TokenFileReport,
    document_count: u64,
    /// The token between documents; `null` where they are joined as they are.
    document_separator: Option<&'static str>,
    text_bytes: u64,
    bytes_per_token: f64,
}

impl TokenFileReport {
    /// Those of a file with this header.
    pub fn of(file: &Path, header: &TokenFileHeader) -> TokenFileReport {
        let tokenizer = header.tokenizer.as_ref().map(|tokenizer| TokenizerReport {
            name: tokenizer.name.clone(),
            sha256: (tokenizer.fingerprint != Sha256Digest::default())
                .then(|| hex::encode(tokenizer.fingerprint)),
        });
        TokenFileReport {
            file: file.display().to_string(),
            layout: header.layout.name(),
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

    /// The same, read through and found right.
    pub fn verified(mut self, largest_id: Option<u32>) -> TokenFileReport {
        let checksum = self.tokens_sha256.is_some().then_some(true);
        self.verified = Some(VerificationReport { checksum, largest_id });
        self
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut page = TextPage::default();
        page.heading(&self.file);
        let mut fields = self.fields();
        fields.push(("layout", self.layout.into()));
        let end_of_text = match self.end_of_text_id {
            Some(id) => format!("id {id} between documents"),
            None if self.layout == TokenFileLayout::Narrows.name() => "none".into(),
            None => "not stated".into(),
        };
        fields.push(("end of text", end_of_text));
        fields.push(("SHA-256", self.tokens_sha256.clone().unwrap_or("not stated".into())));
        if let Some(verified) = &self.verified {
            let checksum = if verified.checksum.is_some() { "checksum" } else { "length" };
            let ids = match verified.largest_id {
                Some(id) => format!("every id, of which {id} is the largest"),
                None => "no ids".into(),
            };
            fields.push(("verified", format!("{checksum} and {ids}")));
        }
        page.fields(&fields);
        page.finish()
    }

    fn fields(&self) -> Vec<(&'static str, String)> {
        let TokenFileReport { token_count, token_width_bytes, .. } = self;
        let size = Bytes(self.file_bytes);
        let tokens = thousands(*token_count);
        let vocabulary = match (&self.vocabulary_size, &self.tokenizer) {
            (Some(size), Some(tokenizer)) => {
                format!("{} ids, {}", thousands((*size).into()), tokenizer.name)
            }
            (Some(size), None) => format!("{} ids", thousands((*size).into())),
            (None, _) => "not stated".into(),
        };
        vec![
            ("tokens", format!("{tokens} of {token_width_bytes} bytes, {size} in all")),
            ("vocabulary", vocabulary),
        ]
    }
}

impl NewTokenFileReport {
    /// What was made of some documents.
    pub fn of(
        contents: TokenFileReport,
        document_count: u64,
        text_bytes: u64,
        document_separator: Option<&'static str>,
    ) -> NewTokenFileReport {
        let bytes_per_token = text_bytes as f64 / contents.token_count.max(1) as f64;
        NewTokenFileReport {
            contents,
            document_count,
            document_separator,
            text_bytes,
            bytes_per_token,
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut page = TextPage::default();
        page.heading(&self.contents.file);
        let documents = match (self.document_count, self.document_separator) {
            (1, _) => "1 document".into(),
            (count, Some(name)) => format!("{}, `{name}` between them", plural(count, "document")),
            (count, None) => {
                format!(
                    "{}, joined as they are: there is no end-of-text token",
                    plural(count, "document")
                )
            }
        };
        let bytes = plural(self.text_bytes, "byte");
        let text = format!("{bytes}, {:.2} a token; {documents}", self.bytes_per_token);
        let mut fields = self.contents.fields();
        fields.insert(0, ("text", text));
        page.fields(&fields);
        page.finish()
    }
}
