"""Weights under the names of the original training codes, and the logits of their modules.

Modules with the names and the arithmetic of CoLA, CoLA-M, LORO, Hugging Face's LLaMA and Phi-3, BOOST and
InternLM2, written for this purpose after the published sources. `state_dict` gives the names; nothing is shared with the Rust code.

    python tests/golden/weights/make.py

writes safetensors files beside this script, and `cases.json` with configurations, tokens and logits.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

FOLDER = Path(__file__).parent
VOCAB, HIDDEN, HEADS, D_FF, LAYERS = 16, 16, 4, 24, 2
SHAPE = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=D_FF,
             num_hidden_layers=LAYERS, max_position_embeddings=32, rms_norm_eps=1e-6)


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x):
    """Half-rotated position embedding of [batch, heads, length, features]."""
    length, features = x.shape[-2:]
    inverse = 1.0 / 10000.0 ** (torch.arange(0, features, 2, dtype=x.dtype) / features)
    angles = torch.arange(length, dtype=x.dtype)[:, None] * inverse[None, :]
    angles = torch.cat([angles, angles], dim=-1)
    first, second = x[..., : features // 2], x[..., features // 2 :]
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def attention(q, k, v, rotated=HIDDEN // HEADS):
    def heads(y):
        return y.view(*y.shape[:2], -1, HIDDEN // HEADS).transpose(1, 2)

    def partly(x):
        return torch.cat([rotate(x[..., :rotated]), x[..., rotated:]], dim=-1)

    q, k, v = partly(heads(q)), partly(heads(k)), heads(v)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


class Cola(nn.Module):
    def __init__(self, d_in, d_out, rank):
        super().__init__()
        self.cola_a = nn.Parameter(torch.empty(d_in, rank))
        self.cola_b = nn.Parameter(torch.empty(rank, d_out))

    def forward(self, x):
        return F.silu(x @ self.cola_a) @ self.cola_b


class Loro(nn.Module):
    def __init__(self, d_in, d_out, rank):
        super().__init__()
        self.weight_in = nn.Parameter(torch.empty(d_in, rank))
        self.weight_out = nn.Parameter(torch.empty(d_out, rank))

    def forward(self, x):
        return x @ self.weight_in @ self.weight_out.T


class SelfAttention(nn.Module):
    def __init__(self, linear, kv):
        super().__init__()
        self.q_proj, self.o_proj = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.k_proj, self.v_proj = linear(HIDDEN, kv), linear(HIDDEN, kv)

    def forward(self, x):
        return self.o_proj(attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Mlp(nn.Module):
    def __init__(self, linear, gate_activation):
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, D_FF), linear(HIDDEN, D_FF)
        self.down_proj, self.act = linear(D_FF, HIDDEN), gate_activation

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, linear, kv, gate_activation):
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(linear, kv), Mlp(linear, gate_activation)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(), RmsNorm()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers, self.norm = nn.ModuleList(layers), RmsNorm()

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class CausalLm(nn.Module):
    def __init__(self, model, tied=False):
        super().__init__()
        self.model = model
        if not tied:
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        head = self.lm_head.weight if hasattr(self, "lm_head") else self.model.embed_tokens.weight
        return self.model(tokens) @ head.T


class ColaA(nn.Module):
    def __init__(self, d_in, rank):
        super().__init__()
        self.cola_a = nn.Parameter(torch.empty(d_in, rank))

    def forward(self, x):
        return F.silu(x @ self.cola_a)


class ColaB(nn.Module):
    def __init__(self, rank, d_out):
        super().__init__()
        self.cola_b = nn.Parameter(torch.empty(rank, d_out))

    def forward(self, x):
        return x @ self.cola_b


class Modules(nn.Module):
    """Submodules by name."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class ColaMLayer(nn.Module):
    """A layer of CoLA-M, which computes B of `down` of the layer before it."""

    def __init__(self, index, rank):
        super().__init__()
        down = lambda: Modules(post_down_proj=ColaB(rank, HIDDEN))
        if index > 0:
            self.last_layer_post_mlp = down()
        if index == LAYERS - 1:
            self.post_mlp = down()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(), RmsNorm()
        self.pre_attn = Modules(**{f"pre_{n}_proj": ColaA(HIDDEN, rank) for n in "qkv"})
        self.self_attn = Modules(**{f"post_{n}_proj": ColaB(rank, HIDDEN) for n in "qkv"},
                                 pre_o_proj=ColaA(HIDDEN, rank))
        self.post_attn = Modules(post_o_proj=ColaB(rank, HIDDEN))
        self.pre_mlp = Modules(**{f"pre_{n}_proj": ColaA(HIDDEN, rank) for n in ("gate", "up")})
        self.self_mlp = Modules(**{f"post_{n}_proj": ColaB(rank, D_FF) for n in ("gate", "up")},
                                pre_down_proj=ColaA(D_FF, rank))

    def forward(self, x, residual):
        if hasattr(self, "last_layer_post_mlp"):
            x = self.last_layer_post_mlp.post_down_proj(x) + residual
        residual, n = x, self.input_layernorm(x)
        pre, post = self.pre_attn, self.self_attn
        mixed = attention(post.post_q_proj(pre.pre_q_proj(n)), post.post_k_proj(pre.pre_k_proj(n)),
                          post.post_v_proj(pre.pre_v_proj(n)))
        x = residual + self.post_attn.post_o_proj(post.pre_o_proj(mixed))
        residual, n = x, self.post_attention_layernorm(x)
        gate = self.self_mlp.post_gate_proj(self.pre_mlp.pre_gate_proj(n))
        up = self.self_mlp.post_up_proj(self.pre_mlp.pre_up_proj(n))
        x = self.self_mlp.pre_down_proj(F.silu(gate) * up)
        if hasattr(self, "post_mlp"):
            x = self.post_mlp.post_down_proj(x) + residual
        return x, residual


class ColaMDecoder(Decoder):
    def forward(self, tokens):
        x = residual = self.embed_tokens(tokens)
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm(x)


class Weight(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))

    def forward(self, x):
        """x·Wᵀ; a batch of matrices applies to the same number of latents, [..., n, r]."""
        if self.weight.dim() == 2:
            return x @ self.weight.T
        return torch.einsum("...nr,nor->n...o", x, self.weight)


class Boost(nn.Module):
    def __init__(self, kv, attn_rank, mlp_rank):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(), RmsNorm()
        self.attn = Modules(qkv_proj0=Weight(3 * attn_rank, HIDDEN), o_proj0=Weight(attn_rank, HIDDEN),
                            o_proj1=Weight(HIDDEN, attn_rank))
        if kv < HIDDEN:
            self.attn.q_proj1 = Weight(HIDDEN, attn_rank)
            self.attn.kv_proj1 = Weight(2, kv, attn_rank)
        else:
            self.attn.qkv_proj1 = Weight(3, HIDDEN, attn_rank)
        self.mlp = Modules(gate_up_proj0=Weight(2 * mlp_rank, HIDDEN),
                           gate_up_proj1=Weight(2, D_FF, mlp_rank),
                           down_proj0=Weight(mlp_rank, D_FF), down_proj1=Weight(HIDDEN, mlp_rank))

    def forward(self, x):
        latents = F.silu(self.attn.qkv_proj0(self.input_layernorm(x))).unflatten(-1, (3, -1))
        if hasattr(self.attn, "kv_proj1"):
            q = self.attn.q_proj1(latents[..., 0, :])
            k, v = self.attn.kv_proj1(latents[..., 1:, :])
        else:
            q, k, v = self.attn.qkv_proj1(latents)
        x = x + self.attn.o_proj1(F.silu(self.attn.o_proj0(attention(q, k, v))))
        latents = F.silu(self.mlp.gate_up_proj0(self.post_attention_layernorm(x)))
        gate, up = self.mlp.gate_up_proj1(latents.unflatten(-1, (2, -1)))
        return x + self.mlp.down_proj1(F.silu(self.mlp.down_proj0(gate * up)))


class NanotronDense(nn.Module):
    def __init__(self, kv):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(), RmsNorm()
        self.attn = Modules(qkv_proj=Weight(HIDDEN + 2 * kv, HIDDEN), o_proj=Weight(HIDDEN, HIDDEN))
        self.mlp = Modules(gate_up_proj=Weight(2 * D_FF, HIDDEN), down_proj=Weight(HIDDEN, D_FF))
        self.kv = kv

    def forward(self, x):
        qkv = self.attn.qkv_proj(self.input_layernorm(x))
        x = x + self.attn.o_proj(attention(*qkv.split([HIDDEN, self.kv, self.kv], dim=-1)))
        gate, up = self.mlp.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.mlp.down_proj(F.silu(gate) * up)


class Nanotron(nn.Module):
    """The names of Nanotron: every module lies in a `pp_block`."""

    def __init__(self, layers, tied):
        super().__init__()
        embedding = Modules(token_embedding=nn.Embedding(VOCAB, HIDDEN))
        self.model = Modules(token_position_embeddings=Modules(pp_block=embedding),
                             decoder=nn.ModuleList([Modules(pp_block=layer) for layer in layers]),
                             final_layer_norm=Modules(pp_block=RmsNorm()))
        if not tied:
            self.model.lm_head = Modules(pp_block=nn.Linear(HIDDEN, VOCAB, bias=False))

    def forward(self, tokens):
        table = self.model.token_position_embeddings.pp_block.token_embedding
        x = table(tokens)
        for layer in self.model.decoder:
            x = layer.pp_block(x)
        x = self.model.final_layer_norm.pp_block(x)
        head = self.model.lm_head.pp_block if hasattr(self.model, "lm_head") else table
        return x @ head.weight.T


class Phi3Layer(nn.Module):
    """A layer of Phi-3: q, k and v one below the other, gate and up too, and half of a head rotated."""

    def __init__(self, kv):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(), RmsNorm()
        self.self_attn = Modules(qkv_proj=dense(HIDDEN, HIDDEN + 2 * kv), o_proj=dense(HIDDEN, HIDDEN))
        self.mlp = Modules(gate_up_proj=dense(HIDDEN, 2 * D_FF), down_proj=dense(D_FF, HIDDEN))
        self.kv = kv

    def forward(self, x):
        qkv = self.self_attn.qkv_proj(self.input_layernorm(x)).split([HIDDEN, self.kv, self.kv], dim=-1)
        x = x + self.self_attn.o_proj(attention(*qkv, rotated=HIDDEN // HEADS // 2))
        gate, up = self.mlp.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.mlp.down_proj(up * F.silu(gate))


class InternLm2Layer(nn.Module):
    """A layer of InternLM2: for each KV head, its heads of q, then k and v."""

    def __init__(self, kv):
        super().__init__()
        self.attention_norm, self.ffn_norm = RmsNorm(), RmsNorm()
        self.attention = Modules(wqkv=dense(HIDDEN, HIDDEN + 2 * kv), wo=dense(HIDDEN, HIDDEN))
        self.feed_forward = Modules(w1=dense(HIDDEN, D_FF), w3=dense(HIDDEN, D_FF), w2=dense(D_FF, HIDDEN))
        self.kv_heads = kv * HEADS // HIDDEN

    def forward(self, x):
        qkv = self.attention.wqkv(self.attention_norm(x))
        qkv = qkv.unflatten(-1, (self.kv_heads, HEADS // self.kv_heads + 2, HIDDEN // HEADS))
        q, k, v = (part.flatten(2) for part in (qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]))
        x = x + self.attention.wo(attention(q, k, v))
        n, mlp = self.ffn_norm(x), self.feed_forward
        return x + mlp.w2(F.silu(mlp.w1(n)) * mlp.w3(n))


class InternLm2(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.model = Modules(tok_embeddings=nn.Embedding(VOCAB, HIDDEN), layers=nn.ModuleList(layers),
                             norm=RmsNorm())
        self.output = dense(HIDDEN, VOCAB)

    def forward(self, tokens):
        x = self.model.tok_embeddings(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.output(self.model.norm(x))


def dense(d_in, d_out):
    return nn.Linear(d_in, d_out, bias=False)


def layers(linear, kv=HIDDEN, gate_activation=F.silu):
    return [Layer(linear, kv, gate_activation) for _ in range(LAYERS)]


def cases():
    """Configuration, module and format of the elements, by name."""
    cola = dict(SHAPE, architectures=["ColaForCausalLM"], model_type="cola", rank=6)
    pair = lambda *widths: Cola(*widths, 6)
    plain = lambda y: y
    boost = dict(SHAPE, is_cola_llama_config=True, attn_rank=4, mlp_rank=6)
    llama = dict(SHAPE, architectures=["LlamaForCausalLM"], model_type="llama")
    grouped = dict(num_key_value_heads=2)
    loro = lambda *widths: Loro(*widths, 5)
    lowrank = dict(product="swiglu", all=dict(rank=5, activation="identity"))
    return {
        "cola": (cola, CausalLm(Decoder(layers(pair, gate_activation=plain))), torch.bfloat16),
        "cola-gate": (dict(cola, only_lr_act=False, tie_word_embeddings=True),
                      CausalLm(Decoder(layers(pair)), tied=True), torch.float32),
        "cola-m": (dict(cola, architectures=["ColaMForCausalLM"], model_type="cola_m", only_lr_act=False),
                   CausalLm(ColaMDecoder([ColaMLayer(n, 6) for n in range(LAYERS)])), torch.float32),
        "loro": (dict(format="narrows-model/1", hidden=HIDDEN, vocab=VOCAB, heads=HEADS, d_ff=D_FF,
                      blocks=dict(count=LAYERS, default=lowrank)),
                 CausalLm(Decoder(layers(loro))), torch.float32),
        "llama": (dict(llama, **grouped), CausalLm(Decoder(layers(dense, kv=8))), torch.float16),
        "boost": (boost, Nanotron([Boost(HIDDEN, 4, 6) for _ in range(LAYERS)], False), torch.float32),
        "boost-grouped": (dict(boost, tie_word_embeddings=True, **grouped),
                          Nanotron([Boost(8, 4, 6) for _ in range(LAYERS)], True), torch.bfloat16),
        "nanotron": (dict(SHAPE, is_llama_config=True, **grouped),
                     Nanotron([NanotronDense(8) for _ in range(LAYERS)], False), torch.float32),
        "phi3": (dict(SHAPE, architectures=["Phi3ForCausalLM"], model_type="phi3", pad_token_id=3,
                      partial_rotary_factor=0.5, sliding_window=None, **grouped),
                 CausalLm(Decoder([Phi3Layer(8) for _ in range(LAYERS)])), torch.bfloat16),
        "internlm2": (dict(SHAPE, architectures=["InternLM2ForCausalLM"], model_type="internlm2", bias=False,
                           pad_token_id=None, **grouped),
                      InternLm2([InternLm2Layer(8) for _ in range(LAYERS)]), torch.float32),
    }


def main():
    written = {}
    for seed, (name, (config, module, dtype)) in enumerate(cases().items(), start=1):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, weight in module.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                centre = 1.0 if "norm" in key else 0.0
                weight.copy_((centre + 0.3 * noise).to(dtype))
        weights = {key: value.to(dtype).contiguous() for key, value in module.state_dict().items()}
        files = {"model.safetensors": weights}
        if name == "llama":
            split = {key: f"model-0000{1 + ('layers.1' in key)}-of-00002.safetensors" for key in weights}
            files = {file: {k: w for k, w in weights.items() if split[k] == file} for file in split.values()}
        folder = FOLDER / name
        folder.mkdir(exist_ok=True)
        for file, tensors in files.items():
            save_file(tensors, folder / file, metadata=dict(format="pt"))
        if name == "llama":
            index = dict(metadata=dict(total_size=sum(w.nbytes for w in weights.values())), weight_map=split)
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        tokens = torch.randint(0, VOCAB, (2, 7), generator=generator)
        with torch.no_grad():
            logits = module.double()(tokens)
        written[name] = dict(config=config, tokens=tokens.flatten().tolist(), sequences=2, length=7,
                             logits=[row.tolist() for row in logits.flatten(0, 1)])
        print(f"{name:14} {sum(w.numel() for w in weights.values())} parameters, "
              f"logits of {math.sqrt(logits.pow(2).mean()):.3f}")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in written.items())
    (FOLDER / "cases.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
