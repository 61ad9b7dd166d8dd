"""Frequencies of scaled RoPE, computed by `modeling_rope_utils` of Hugging Face transformers.

    python tests/golden/rope.py

writes `rope.json` beside this script: for each case the fields of a config, the length of a sequence, the
frequencies and the attention factor. transformers computes them in float32.
"""

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LONG = dict(
    rope_type="longrope",
    short_factor=[1.0, 1.02, 1.05, 1.1, 1.3, 1.7, 2.1, 2.8],
    long_factor=[1.0, 1.2, 1.9, 3.5, 8.0, 19.0, 34.0, 60.0],
)
# Fields of a config, and the length of a sequence.
CASES = [
    (dict(rope_theta=500000.0, head_dim=128, max_position_embeddings=131072, rope_scaling=dict(LLAMA3, factor=8.0)), 8192),
    (dict(rope_theta=500000.0, head_dim=64, max_position_embeddings=131072, rope_scaling=dict(LLAMA3, factor=32.0)), 8192),
    (dict(rope_theta=100000.0, head_dim=128, max_position_embeddings=16384,
          rope_scaling=dict(rope_type="linear", factor=4.0)), 4096),
    # No `original_max_position_embeddings`: transformers 4.49 reads the factor, and the length of the model.
    (dict(rope_theta=1e6, head_dim=128, max_position_embeddings=32768,
          rope_scaling=dict(rope_type="yarn", factor=4.0)), 32768),
    (dict(rope_theta=1e4, head_dim=64, max_position_embeddings=4096,
          rope_scaling=dict(rope_type="yarn", factor=40.0, beta_fast=32, beta_slow=1, attention_factor=0.9)), 4096),
    (dict(rope_theta=1e4, head_dim=16, max_position_embeddings=131072, original_max_position_embeddings=4096,
          rope_scaling=LONG), 4096),
    (dict(rope_theta=1e4, head_dim=16, max_position_embeddings=131072, original_max_position_embeddings=4096,
          rope_scaling=LONG), 4097),
    (dict(rope_theta=1e4, head_dim=32, partial_rotary_factor=0.5, max_position_embeddings=131072,
          original_max_position_embeddings=4096, rope_scaling=LONG), 8192),
    # Plain RoPE up to the length of the model.
    (dict(rope_theta=1e6, head_dim=128, max_position_embeddings=32768,
          rope_scaling=dict(rope_type="dynamic", factor=2.0)), 32768),
]


def case(fields, length):
    shape = dict(hidden_size=64, num_attention_heads=4, intermediate_size=64, num_hidden_layers=1, vocab_size=64)
    config = LlamaConfig(**shape, **fields)
    kind = fields["rope_scaling"]["rope_type"]
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    config = dict(model_type="llama", **shape, **fields)
    return dict(config=config, length=length, frequencies=frequencies.tolist(), attention_factor=attention_factor)


def main():
    cases = [json.dumps(case(*arguments)) for arguments in CASES]
    (Path(__file__).parent / "rope.json").write_text("[\n" + ",\n".join(cases) + "\n]\n")


if __name__ == "__main__":
    main()
