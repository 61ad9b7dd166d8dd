//! Arguments of the attack: its own, and those that `cargo test` gives to every test program.

/// Extent of the attacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extent {
    /// Some attempts, with all other tests.
    #[default]
    FirstLevel,
    /// More attempts, with the tests that are ignored by default.
    SecondLevel,
    /// Minutes.
    Long,
}

/// Selection of attacks, and their extent.
#[derive(Debug, Default)]
pub struct Arguments {
    /// Extent of each attack.
    pub extent: Extent,
    /// The seed of the only attempt.
    pub seed: Option<u64>,
    /// Names of attacks; all if there is none.
    names: Vec<String>,
}

impl Arguments {
    /// Reads the arguments.
    ///
    /// # Errors
    /// An unknown flag or name, and a seed that is no number.
    pub fn parse(
        words: impl IntoIterator<Item = String>,
        known: &[&str],
    ) -> Result<Arguments, String> {
        let mut arguments = Arguments::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--long" => arguments.extent = Extent::Long,
                "--seed" => {
                    let text = words.next().unwrap_or_default();
                    let digits = text.strip_prefix("0x").unwrap_or(&text);
                    let seed = u64::from_str_radix(digits, 16);
                    arguments.seed = Some(
                        seed.map_err(|_| format!("--seed: `{text}` is no hexadecimal number"))?,
                    );
                }
                "--ignored" => arguments.extent = Extent::SecondLevel,
                // Flags of test programs that mean nothing here.
                "--skip" | "--test-threads" => drop(words.next()),
                "--nocapture" | "--include-ignored" | "--exact" | "--quiet" => {}
                name if known.contains(&name) => arguments.names.push(name.into()),
                flag if flag.starts_with('-') => return Err(format!("{flag} is unknown")),
                // A filter of tests of all programs.
                _ => arguments.names.push(word),
            }
        }
        Ok(arguments)
    }

    /// Whether an attack is run.
    pub fn selects(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|known| known == name)
    }
}
