//! The next token, from the logits of all tokens.
//!
//! At temperature t the probabilities are softmax(logits / t). Of these, the likeliest tokens that together reach the
//! share p remain (nucleus sampling, Holtzman et al. 2020), at least one. At temperature 0 the likeliest token is taken,
//! the first of several.

use narrows_runtime::CounterRng;

/// Choice of tokens.
#[derive(Clone, Debug)]
pub enum TokenChoice {
    /// The likeliest token.
    Greedy,
    /// A random token.
    Random {
        /// Divides the logits; above 0.
        temperature: f64,
        /// Share of the probability that remains, above 0 and at most 1.
        top_p: f64,
        /// Element n decides token n.
        random: CounterRng,
    },
}

impl TokenChoice {
    /// Greedy at temperature 0, else random with this seed.
    pub fn new(temperature: f64, top_p: f64, seed: u64) -> TokenChoice {
        let random = CounterRng::new(seed, "generate");
        match temperature {
            0.0 => TokenChoice::Greedy,
            _ => TokenChoice::Random { temperature, top_p, random },
        }
    }

    /// The token number `number` of a text; `None` where a logit is not finite.
    pub fn choose(&self, logits: &[f32], number: u64) -> Option<u32> {
        if logits.iter().any(|logit| !logit.is_finite()) {
            return None;
        }
        let (likeliest, largest) = logits
            .iter()
            .enumerate()
            .reduce(|best, next| if next.1 > best.1 { next } else { best })?;
        let TokenChoice::Random { temperature, top_p, random } = self else {
            return Some(likeliest as u32);
        };
        let weight = |logit: &f32| (f64::from(*logit - *largest) / temperature).exp();
        let weights: Vec<f64> = logits.iter().map(weight).collect();
        let nucleus = nucleus(&weights, *top_p);
        let total: f64 = nucleus.iter().map(|token| weights[*token]).sum();
        let mut rest = random.uniform(number) * total;
        let chosen = nucleus.iter().find(|token| {
            rest -= weights[**token];
            rest < 0.0
        });
        // The rest of a sum of other order may be a rounding above zero.
        chosen.or(nucleus.last()).map(|token| *token as u32)
    }
}

/// The likeliest tokens that together reach the share `top_p`, the likeliest first; all tokens in their order for 1.
fn nucleus(weights: &[f64], top_p: f64) -> Vec<usize> {
    if top_p >= 1.0 {
        return (0..weights.len()).collect();
    }
    let total: f64 = weights.iter().sum();
    // All tokens below this weight together have less than the share that is left out.
    let least = (1.0 - top_p) * total / weights.len() as f64;
    let mut tokens: Vec<usize> =
        (0..weights.len()).filter(|token| weights[*token] >= least).collect();
    tokens.sort_by(|one, other| weights[*other].total_cmp(&weights[*one]));
    let mut sum = 0.0;
    let kept = tokens.iter().take_while(|token| {
        let is_needed = sum < top_p * total;
        sum += weights[**token];
        is_needed
    });
    let kept = kept.count();
    tokens.truncate(kept.max(1));
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 3.0, 1.0, 3.0, -2.0];

    #[test]
    fn the_likeliest_token_is_the_first_of_several() {
        assert_eq!(TokenChoice::new(0.0, 1.0, 7).choose(&LOGITS, 3), Some(1));
        assert_eq!(TokenChoice::new(0.0, 1.0, 7).choose(&[f32::NAN, 1.0], 0), None);
        // The share of the likeliest token alone reaches a small p.
        let choice = TokenChoice::new(1.0, 1e-9, 7);
        assert!((0..50).all(|number| choice.choose(&LOGITS, number) == Some(1)));
    }

    #[test]
    fn a_nucleus_has_the_fewest_tokens_that_reach_the_share() {
        arbtest::arbtest(|u| {
            let count = u.int_in_range(1..=30)?;
            let weights: Vec<f64> = (0..count)
                .map(|_| Ok(f64::from(u.arbitrary::<u8>()?) + 1e-3))
                .collect::<Result<_, _>>()?;
            let top_p = f64::from(u.int_in_range(1..=100_u8)?) / 100.0;
            let kept = nucleus(&weights, top_p);
            let total: f64 = weights.iter().sum();
            let share = |tokens: &[usize]| tokens.iter().map(|t| weights[*t]).sum::<f64>() / total;
            assert!(share(&kept) >= top_p - 1e-9);
            let least = kept.iter().map(|token| weights[*token]).fold(f64::MAX, f64::min);
            assert!((0..count).all(|t| kept.contains(&t) || weights[t] <= least));
            if top_p < 1.0 {
                assert!(kept.len() == 1 || share(&kept[..kept.len() - 1]) < top_p + 1e-9);
            }
            Ok(())
        })
        .budget_ms(200);
    }

    /// Frequencies of 20,000 tokens at temperature 2 are within four standard deviations of softmax(logits / 2).
    #[test]
    fn tokens_have_the_probabilities_of_the_softmax() {
        let choice = TokenChoice::new(2.0, 1.0, 11);
        let count = 20_000;
        let mut found = [0_u32; 5];
        (0..count).for_each(|n| found[choice.choose(&LOGITS, n).unwrap() as usize] += 1);
        let total: f64 = LOGITS.iter().map(|logit| f64::from(logit / 2.0).exp()).sum();
        for (found, logit) in found.iter().zip(LOGITS) {
            let p = f64::from(logit / 2.0).exp() / total;
            let deviation = (p * (1.0 - p) / count as f64).sqrt();
            assert!((f64::from(*found) / count as f64 - p).abs() < 4.0 * deviation, "{found}, {p}");
        }
    }

    #[test]
    fn a_seed_decides_every_token() {
        let tokens = |seed| {
            let choice = TokenChoice::new(1.0, 0.9, seed);
            (0..40).map(|n| choice.choose(&LOGITS, n).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(tokens(5), tokens(5));
        assert_ne!(tokens(5), tokens(6));
    }
}
