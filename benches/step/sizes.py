"""Sizes of the CoLA presets, and the FLOPs of a training step. Plain Python, without torch."""

from typing import NamedTuple


class Sizes(NamedTuple):
    layers: int
    hidden: int
    d_ff: int
    heads: int
    rank: int
    vocabulary: int = 32_000
    tied: bool = True
    # SiLU on the gate as well as in the latents.
    gate_silu: bool = False

    def block_gemm_weights(self):
        """GEMM weights of a block: q, k, v and o map hidden to hidden; gate, up and down between hidden and d_ff."""
        return self.rank * (4 * 2 * self.hidden + 3 * (self.hidden + self.d_ff))

    def parameters(self):
        """Number of parameters: GEMM weights, two norms a block and the final norm, embedding, and an untied head."""
        blocks = self.layers * (self.block_gemm_weights() + 2 * self.hidden)
        return blocks + self.hidden + (1 if self.tied else 2) * self.vocabulary * self.hidden

    def flops_of_sequence(self, length):
        """Model FLOPs of a sequence, forward and backward, without recomputation.

        Each GEMM weight takes 6 FLOPs a token. Attention takes 2 * 2 * hidden FLOPs forward for each of the
        length * (length + 1) / 2 causal pairs of tokens (scores and weighted sum of values), and twice that backward.
        """
        weights = self.layers * self.block_gemm_weights() + self.vocabulary * self.hidden
        attention = self.layers * 3 * 2 * length * (length + 1) * self.hidden
        return 6 * weights * length + attention


SIZES = {
    "cola-tiny": Sizes(4, 256, 688, 8, 64, vocabulary=256, tied=False),
    "cola-60m": Sizes(8, 512, 1376, 8, 128, tied=False, gate_silu=True),
    "cola-130m": Sizes(12, 768, 2048, 12, 256, tied=False, gate_silu=True),
    "cola-350m": Sizes(24, 1024, 2736, 16, 256, tied=False),
    "cola-1b": Sizes(24, 2048, 5472, 32, 512),
    "cola-3b": Sizes(28, 3072, 8192, 24, 768),
    "cola-7b": Sizes(32, 4096, 11_008, 32, 1024),
}
