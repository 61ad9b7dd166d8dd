//! Fingerprints of models.

use sha2::{Digest, Sha256};

use super::file::DEFAULT_INITIAL_STD;
use super::{
    Activation, AttentionMask, Block, CrossingForm, CrossingGate, GatedProduct, LatentCrossing,
    Linear, Model, Positions, RopeScaling, Weight,
};

impl Model {
    /// SHA-256 in 64 hex digits of everything but the name and the special tokens. Equal models have equal fingerprints, whatever
    /// the format and wording of their files.
    pub fn fingerprint(&self) -> String {
        let mut canonical = CanonicalWriter::default();
        canonical.model(self);
        hex::encode(Sha256::digest(&canonical.0))
    }
}

/// Writes the canonical serialisation: fields in a fixed order, numbers as eight little-endian bytes, enums
/// as numbers, and every list after its length, so that different models differ in bytes.
///
/// Plans name models by fingerprint: new cases may be added, existing numbers may not change.
#[derive(Default)]
struct CanonicalWriter(Vec<u8>);

impl CanonicalWriter {
    fn number(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    fn model(&mut self, model: &Model) {
        self.0.extend(b"narrows model 1\n");
        for size in [model.hidden, model.vocab, model.heads, model.kv_heads, model.head_dim] {
            self.number(size);
        }
        self.number(model.norm_epsilon.to_bits());
        self.number(model.rope.theta.to_bits());
        self.number(model.max_sequence_length);
        self.number(model.tied.into());
        self.number(model.blocks.len() as u64);
        model.blocks.iter().for_each(|block| self.block(block));
        self.extensions(model);
    }

    /// Fields that the first version did not have. Each is a number of its own and its value, and is left
    /// out where it has the value that earlier fingerprints imply.
    fn extensions(&mut self, model: &Model) {
        if let Some(token) = model.padding_token {
            [1, token].into_iter().for_each(|number| self.number(number));
        }
        if model.initial_std != DEFAULT_INITIAL_STD {
            [2, model.initial_std.to_bits()].into_iter().for_each(|number| self.number(number));
        }
        if model.has_latent_norms() {
            let epsilon = model.latent_norm_epsilon.to_bits();
            [3, epsilon].into_iter().for_each(|number| self.number(number));
        }
        if model.rope.dim != model.head_dim {
            [4, model.rope.dim].into_iter().for_each(|number| self.number(number));
        }
        if let Some(scaling) = &model.rope.scaling {
            self.number(5);
            self.rope_scaling(scaling);
        }
        if let Some(alpha) = model.latent_residual {
            [10, alpha.to_bits()].into_iter().for_each(|number| self.number(number));
        }
        for (index, block) in model.blocks.iter().enumerate() {
            if block.positions == Positions::None {
                [6, index as u64].into_iter().for_each(|number| self.number(number));
            }
            if block.qkv_bias {
                [7, index as u64].into_iter().for_each(|number| self.number(number));
            }
            if block.qk_norm {
                [8, index as u64].into_iter().for_each(|number| self.number(number));
            }
            if let AttentionMask::SlidingWindow(window) = block.attention {
                [9, index as u64, window].into_iter().for_each(|number| self.number(number));
            }
        }
    }

    fn rope_scaling(&mut self, scaling: &RopeScaling) {
        let (kind, values, original_length, lists) = match scaling {
            RopeScaling::Linear { factor } => (0, vec![factor], 0, [&[][..], &[]]),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_length } => (
                1,
                vec![factor, low_freq_factor, high_freq_factor],
                *original_length,
                [&[][..], &[]],
            ),
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                attention_factor,
                original_length,
            } => {
                let values = vec![factor, beta_fast, beta_slow, attention_factor];
                (2, values, *original_length, [&[][..], &[]])
            }
            RopeScaling::LongRope { short, long, attention_factor, original_length } => {
                (3, vec![attention_factor], *original_length, [&short[..], long])
            }
        };
        self.number(kind);
        values.into_iter().for_each(|value| self.number(value.to_bits()));
        self.number(original_length);
        for list in lists {
            self.number(list.len() as u64);
            list.iter().for_each(|value| self.number(value.to_bits()));
        }
    }

    fn block(&mut self, block: &Block) {
        self.number(match block.product {
            GatedProduct::Plain => 0,
            GatedProduct::SwiGlu => 1,
        });
        block.linears().into_iter().for_each(|(_, linear)| self.linear(linear));
    }

    fn linear(&mut self, linear: &Linear) {
        self.number(linear.d_in);
        self.number(linear.d_out);
        let Weight::Pair(pair) = &linear.weight else { return self.number(0) };
        self.number(1);
        self.number(pair.rank);
        self.number(match pair.activation {
            Activation::Identity => 0,
            Activation::Silu => 1,
        });
        self.crossing(pair.crossing.as_ref());
    }

    fn crossing(&mut self, crossing: Option<&LatentCrossing>) {
        let Some(crossing) = crossing else { return self.number(0) };
        self.number(match crossing.form {
            CrossingForm::Paper => 1,
            CrossingForm::Released => 2,
        });
        match crossing.gate {
            CrossingGate::Identity => self.number(0),
            CrossingGate::Dense => self.number(1),
            CrossingGate::Affine => self.number(3),
            CrossingGate::Tensor { a, b } => [2, a, b].into_iter().for_each(|n| self.number(n)),
        }
    }
}
