"""What llama.cpp calls the families it runs, and their tensors; and what of a spec it cannot express."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from glasshouse.hub.families.family import TensorMapping, fused_gate, fused_qkv
from glasshouse.spec import LinearScaling, Llama3Scaling, NoScaling, Rotary, TransformerSpec

BLOCK = "stack.blocks.*"
NAMES: dict[str, TensorMapping | str] = {
    "token_embedding.table": "token_embd",
    "stack.position.table": "position_embd",
    f"{BLOCK}.attention.norm": "blk.*.attn_norm",
    f"{BLOCK}.attention.norm_out": "blk.*.post_attention_norm",
    f"{BLOCK}.attention.layer.query": "blk.*.attn_q",
    f"{BLOCK}.attention.layer.key": "blk.*.attn_k",
    f"{BLOCK}.attention.layer.value": "blk.*.attn_v",
    f"{BLOCK}.attention.layer.out": "blk.*.attn_output",
    f"{BLOCK}.attention.layer.q_norm": "blk.*.attn_q_norm",
    f"{BLOCK}.attention.layer.k_norm": "blk.*.attn_k_norm",
    f"{BLOCK}.attention.layer.q_norm.norm": "blk.*.attn_q_norm",
    f"{BLOCK}.attention.layer.k_norm.norm": "blk.*.attn_k_norm",
    f"{BLOCK}.feedforward.norm": "blk.*.ffn_norm",
    f"{BLOCK}.feedforward.norm_out": "blk.*.post_ffw_norm",
    f"{BLOCK}.feedforward.layer.gate": "blk.*.ffn_gate",
    f"{BLOCK}.feedforward.layer.up": "blk.*.ffn_up",
    f"{BLOCK}.feedforward.layer.down": "blk.*.ffn_down",
    "stack.norm": "output_norm",
    "head.weight": "output.weight",
}
QKV = fused_qkv("blk.*.attn_qkv", "in turn")
GATE_UP = fused_gate("blk.*.ffn_up")


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures."""

    name: str
    fused: Mapping[str, TensorMapping | str] = field(default_factory=dict)  # matrices that are parts of others
    rotates_pairs: bool = False  # neighbouring coordinates, not those half a head apart
    stores_tied_head: bool = False  # the head has a matrix of its own also where it is the embedding's
    has_wide_heads: bool = False  # all heads together may be wider or narrower than the model
    biases: tuple[bool, bool] | None = None  # of queries, keys and values; of all others. None: any
    activation: str = "swiglu"  # of the feed-forward layers
    full_every: int = 1  # one in so many layers has no sliding window, the last of them
    n_layers_27b: int = 0  # of Gemma's

    @property
    def names(self) -> Mapping[str, TensorMapping | str]:
        """Our modules or tensors, and theirs; `*` is the index of a block."""
        return {**NAMES, **self.fused}

    def unsupported(self, s: TransformerSpec) -> Iterator[str]:
        """Yield the fields of a spec of its family that it does not have."""
        windows = [s.window(layer) for layer in range(s.n_layers)]
        if windows != [windows[0] * ((layer + 1) % self.full_every > 0) for layer in range(s.n_layers)]:
            yield "windows"
        if s.attention_scale is not None:
            yield "attention_scale"
        # What has as many layers as Gemma's 27B is taken for it, whose scores are scaled by d_model / n_heads.
        if s.n_layers == self.n_layers_27b and s.n_heads * s.d_head != s.d_model:
            yield "n_layers"
        if self.name == "gemma2":  # which divides by its caps
            yield from (name for name in ("attention_softcap", "logit_softcap") if not getattr(s, name))
        if not self.has_wide_heads and s.n_heads * s.d_head != s.d_model:
            yield "d_head"
        # GELU is the tanh approximation there, whatever a model was trained with.
        if s.feedforward.kind != self.activation:
            yield "feedforward"
        if self.biases is not None and s.qkv_bias != self.biases[0]:
            yield "qkv_bias"
        if self.biases is not None:
            yield from (name for name in ("out_bias", "ffn_bias") if getattr(s, name) != self.biases[1])
        if isinstance(s.position, Rotary):
            scalings = (NoScaling, LinearScaling, Llama3Scaling) if self.rotates_pairs else (NoScaling, LinearScaling)
            if not isinstance(s.position.scaling, scalings):
                yield "position.scaling"


# By the model_type of the family.
ARCHITECTURES = {
    "gpt2": Architecture("gpt2", fused=QKV, biases=(True, True), activation="gelu"),
    "gpt_neox": Architecture("gptneox", fused=QKV, stores_tied_head=True, biases=(True, True), activation="gelu"),
    "llama": Architecture("llama", rotates_pairs=True, has_wide_heads=True),
    "mistral": Architecture("llama", rotates_pairs=True, has_wide_heads=True),
    "qwen2": Architecture("qwen2", biases=(True, False)),
    "qwen3": Architecture("qwen3", has_wide_heads=True, biases=(False, False)),
    "gemma2": Architecture(
        "gemma2", has_wide_heads=True, biases=(False, False), activation="geglu", full_every=2, n_layers_27b=46
    ),
    "gemma3_text": Architecture(
        "gemma3", has_wide_heads=True, biases=(False, False), activation="geglu", full_every=6, n_layers_27b=62
    ),
    "phi3": Architecture("phi3", fused=GATE_UP, biases=(False, False)),
    "olmo2": Architecture("olmo2", stores_tied_head=True, biases=(False, False)),
}
