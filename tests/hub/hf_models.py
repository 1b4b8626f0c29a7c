"""Small random transformers models of every supported family and variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from examples import first_of


class Case(NamedTuple):
    """One variant of a family: how to make it, and whether its norms compute in float32 whatever its dtype."""

    model: type[Any]
    config: Callable[[], Any]
    drops: bool = False
    untie: bool = False


def gpt2(**settings: object) -> Callable[[], Any]:
    base = {"vocab_size": 61, "n_positions": 48, "n_embd": 40, "n_layer": 3, "n_head": 5}
    return lambda: hf.GPT2Config(**base | settings)


LLAMA = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Soft-caps that the scores and logits of such small models reach.
GEMMA2 = {**LLAMA, "head_dim": 12, "sliding_window": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}
GEMMA3 = {**LLAMA, "head_dim": 12, "sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 12}
OLMO2 = {**LLAMA, "eos_token_id": 2}
PHI3 = {**LLAMA, "pad_token_id": 0, "eos_token_id": 2}
BERT = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "max_position_embeddings": 48,
}
MODERNBERT = {**BERT, "pad_token_id": 0, "local_attention": 6, "global_rope_theta": 300.0, "local_rope_theta": 20.0}
T5 = {
    "vocab_size": 61,
    "d_model": 40,
    "d_kv": 12,
    "d_ff": 56,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 5,
}
BART = {
    "vocab_size": 61,
    "d_model": 40,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 5,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 48,
}
MARIAN = {**BART, "pad_token_id": 60, "decoder_start_token_id": 60, "activation_function": "swish"}
DISTIL = {"vocab_size": 61, "dim": 40, "hidden_dim": 56, "n_layers": 3, "n_heads": 5, "max_position_embeddings": 48}

NEOX = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


# transformers finds the last token of a sequence by its padding.
LABELS = {
    "pad_token_id": 0,
    "id2label": {0: "bad", 1: "fair", 2: "good"},
    "label2id": {"bad": 0, "fair": 1, "good": 2},
}
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}


def of(config: type[Any], base: dict[str, Any], **settings: object) -> Callable[[], Any]:
    return lambda: config(**base | settings)


CASES = {
    "gpt2": Case(hf.GPT2LMHeadModel, gpt2()),
    "gpt2-untied-relu-narrow": Case(
        hf.GPT2LMHeadModel, gpt2(tie_word_embeddings=False, activation_function="relu", n_inner=24)
    ),
    "gpt2-no-scale": Case(hf.GPT2LMHeadModel, gpt2(scale_attn_weights=False, activation_function="gelu")),
    "gpt2-labels": Case(hf.GPT2ForSequenceClassification, gpt2(**LABELS)),
    "gpt2-bare": Case(hf.GPT2Model, gpt2()),
    "llama": Case(hf.LlamaForCausalLM, of(hf.LlamaConfig, LLAMA), drops=True),
    "llama-tied-biased": Case(
        hf.LlamaForCausalLM,
        of(hf.LlamaConfig, LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        drops=True,
    ),
    "llama-multi-query-wide-heads": Case(
        hf.LlamaForCausalLM, of(hf.LlamaConfig, LLAMA, num_key_value_heads=1, head_dim=14), drops=True
    ),
    "llama-linear": Case(
        hf.LlamaForCausalLM,
        of(hf.LlamaConfig, LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
        drops=True,
    ),
    "llama-llama3": Case(hf.LlamaForCausalLM, of(hf.LlamaConfig, LLAMA, rope_parameters=LLAMA3), drops=True),
    "llama-yarn": Case(hf.LlamaForCausalLM, of(hf.LlamaConfig, LLAMA, rope_parameters=YARN), drops=True),
    "llama-yarn-own-factor": Case(
        hf.LlamaForCausalLM,
        of(
            hf.LlamaConfig,
            LLAMA,
            rope_parameters={**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0},
        ),
        drops=True,
    ),
    "llama-gelu": Case(hf.LlamaForCausalLM, of(hf.LlamaConfig, LLAMA, hidden_act="gelu_pytorch_tanh"), drops=True),
    "llama-labels": Case(hf.LlamaForSequenceClassification, of(hf.LlamaConfig, LLAMA | LABELS), drops=True),
    "llama-bare": Case(hf.LlamaModel, of(hf.LlamaConfig, LLAMA), drops=True),
    "mistral-window": Case(hf.MistralForCausalLM, of(hf.MistralConfig, LLAMA, sliding_window=5), drops=True),
    "mistral-labels": Case(
        hf.MistralForSequenceClassification, of(hf.MistralConfig, LLAMA | LABELS, sliding_window=5), drops=True
    ),
    "mistral-no-window": Case(hf.MistralForCausalLM, of(hf.MistralConfig, LLAMA, sliding_window=None), drops=True),
    "qwen2": Case(hf.Qwen2ForCausalLM, of(hf.Qwen2Config, LLAMA), drops=True),
    "qwen2-labels": Case(hf.Qwen2ForSequenceClassification, of(hf.Qwen2Config, LLAMA | LABELS), drops=True),
    "qwen2-windows": Case(
        hf.Qwen2ForCausalLM,
        of(
            hf.Qwen2Config,
            LLAMA,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
        drops=True,
    ),
    "qwen3": Case(hf.Qwen3ForCausalLM, of(hf.Qwen3Config, LLAMA, head_dim=12), drops=True),
    "qwen3-labels": Case(
        hf.Qwen3ForSequenceClassification, of(hf.Qwen3Config, LLAMA | LABELS, head_dim=12), drops=True
    ),
    "qwen3-biased-windows": Case(
        hf.Qwen3ForCausalLM,
        of(
            hf.Qwen3Config,
            LLAMA,
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        drops=True,
    ),
    "gemma2": Case(hf.Gemma2ForCausalLM, of(hf.Gemma2Config, GEMMA2, query_pre_attn_scalar=10), drops=True),
    "gemma2-uncapped-biased-untied": Case(
        hf.Gemma2ForCausalLM,
        of(
            hf.Gemma2Config,
            GEMMA2,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
            query_pre_attn_scalar=12,
            hidden_activation="silu",
            layer_types=["full_attention", "full_attention", "sliding_attention"],
        ),
        drops=True,
    ),
    "gemma2-labels": Case(hf.Gemma2ForSequenceClassification, of(hf.Gemma2Config, GEMMA2 | LABELS), drops=True),
    "gemma2-bare": Case(hf.Gemma2Model, of(hf.Gemma2Config, GEMMA2), drops=True),
    "gemma3": Case(hf.Gemma3ForCausalLM, of(hf.Gemma3TextConfig, GEMMA3), drops=True),
    "gemma3-capped-biased-untied": Case(
        hf.Gemma3ForCausalLM,
        of(
            hf.Gemma3TextConfig,
            GEMMA3,
            final_logit_softcapping=20.0,
            attention_bias=True,
            tie_word_embeddings=False,
            query_pre_attn_scalar=10,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
        ),
        drops=True,
    ),
    "gemma3-seven-layers-capped": Case(
        hf.Gemma3ForCausalLM,
        of(
            hf.Gemma3TextConfig,
            GEMMA3,
            num_hidden_layers=7,
            sliding_window_pattern=6,
            final_logit_softcapping=20.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
        drops=True,
    ),
    "gemma3-labels": Case(
        hf.Gemma3TextForSequenceClassification, of(hf.Gemma3TextConfig, GEMMA3 | LABELS), drops=True
    ),
    "gemma3-bare": Case(hf.Gemma3TextModel, of(hf.Gemma3TextConfig, GEMMA3), drops=True),
    "olmo2": Case(hf.Olmo2ForCausalLM, of(hf.Olmo2Config, OLMO2), drops=True),
    "olmo2-all-heads-biased-tied": Case(
        hf.Olmo2ForCausalLM,
        of(hf.Olmo2Config, OLMO2, num_key_value_heads=6, attention_bias=True, tie_word_embeddings=True),
        drops=True,
    ),
    "olmo2-yarn": Case(hf.Olmo2ForCausalLM, of(hf.Olmo2Config, OLMO2, rope_parameters=YARN), drops=True),
    "olmo2-labels": Case(hf.Olmo2ForSequenceClassification, of(hf.Olmo2Config, OLMO2 | LABELS), drops=True),
    "olmo2-bare": Case(hf.Olmo2Model, of(hf.Olmo2Config, OLMO2), drops=True),
    "phi3": Case(hf.Phi3ForCausalLM, of(hf.Phi3Config, PHI3), drops=True),
    "phi3-part-of-heads": Case(hf.Phi3ForCausalLM, of(hf.Phi3Config, PHI3, rope_parameters=HALF), drops=True),
    "phi3-window-tied": Case(
        hf.Phi3ForCausalLM,
        of(
            hf.Phi3Config,
            PHI3,
            num_key_value_heads=6,
            sliding_window=5,
            tie_word_embeddings=True,
            rope_parameters=HALF,
        ),
        drops=True,
    ),
    "phi3-labels": Case(hf.Phi3ForSequenceClassification, of(hf.Phi3Config, PHI3 | LABELS), drops=True),
    "phi3-bare": Case(hf.Phi3Model, of(hf.Phi3Config, PHI3), drops=True),
    "gpt_neox": Case(hf.GPTNeoXForCausalLM, of(hf.GPTNeoXConfig, NEOX), drops=True),
    "gpt_neox-in-turn": Case(
        hf.GPTNeoXForCausalLM,
        of(hf.GPTNeoXConfig, NEOX, use_parallel_residual=False, hidden_act="gelu_fast", tie_word_embeddings=True),
        drops=True,
    ),
    "gpt_neox-old-names": Case(
        hf.GPTNeoXForCausalLM,
        of(hf.GPTNeoXConfig, NEOX, rotary_pct=0.5, rotary_emb_base=500.0, attention_bias=False),
        drops=True,
    ),
    "gpt_neox-whole-heads": Case(hf.GPTNeoXForCausalLM, of(hf.GPTNeoXConfig, NEOX, rotary_pct=1.0), drops=True),
    "gpt_neox-yarn": Case(
        hf.GPTNeoXForCausalLM,
        of(hf.GPTNeoXConfig, NEOX, rope_parameters={**YARN, "partial_rotary_factor": 0.25}),
        drops=True,
    ),
    "gpt_neox-labels": Case(hf.GPTNeoXForSequenceClassification, of(hf.GPTNeoXConfig, NEOX | LABELS), drops=True),
    "gpt_neox-bare": Case(hf.GPTNeoXModel, of(hf.GPTNeoXConfig, NEOX), drops=True),
    "bert-masked": Case(hf.BertForMaskedLM, of(hf.BertConfig, BERT)),
    "bert-masked-untied-relu": Case(
        hf.BertForMaskedLM, of(hf.BertConfig, BERT, hidden_act="relu", type_vocab_size=3, tie_word_embeddings=False)
    ),
    "bert-bare": Case(hf.BertModel, of(hf.BertConfig, BERT)),
    "bert-labels": Case(
        hf.BertForSequenceClassification,
        of(hf.BertConfig, BERT, id2label={0: "bad", 1: "fair", 2: "good"}, label2id={"bad": 0, "fair": 1, "good": 2}),
    ),
    "bert-token-labels": Case(hf.BertForTokenClassification, of(hf.BertConfig, BERT, num_labels=4)),
    "roberta-masked": Case(hf.RobertaForMaskedLM, of(hf.RobertaConfig, BERT, type_vocab_size=1)),
    "roberta-masked-untied": Case(hf.RobertaForMaskedLM, of(hf.RobertaConfig, BERT, tie_word_embeddings=False)),
    "roberta-labels": Case(hf.RobertaForSequenceClassification, of(hf.RobertaConfig, BERT)),
    "roberta-bare": Case(hf.RobertaModel, of(hf.RobertaConfig, BERT)),
    "xlm-roberta-masked": Case(hf.XLMRobertaForMaskedLM, of(hf.XLMRobertaConfig, BERT, type_vocab_size=1)),
    "xlm-roberta-labels": Case(
        hf.XLMRobertaForSequenceClassification, of(hf.XLMRobertaConfig, BERT | LABELS, pad_token_id=1)
    ),
    "xlm-roberta-bare": Case(hf.XLMRobertaModel, of(hf.XLMRobertaConfig, BERT)),
    "distilbert-masked": Case(hf.DistilBertForMaskedLM, of(hf.DistilBertConfig, DISTIL)),
    "distilbert-labels": Case(hf.DistilBertForSequenceClassification, of(hf.DistilBertConfig, DISTIL | LABELS)),
    "distilbert-bare": Case(hf.DistilBertModel, of(hf.DistilBertConfig, DISTIL, activation="relu")),
    "modernbert-masked": Case(hf.ModernBertForMaskedLM, of(hf.ModernBertConfig, MODERNBERT), drops=True),
    "modernbert-masked-biased-untied": Case(
        hf.ModernBertForMaskedLM,
        of(
            hf.ModernBertConfig,
            MODERNBERT,
            attention_bias=True,
            mlp_bias=True,
            norm_bias=True,
            classifier_bias=True,
            decoder_bias=False,
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            hidden_activation="silu",
            classifier_activation="silu",
        ),
        drops=True,
    ),
    "modernbert-bare": Case(hf.ModernBertModel, of(hf.ModernBertConfig, MODERNBERT, num_hidden_layers=7), drops=True),
    "modernbert-labels": Case(
        hf.ModernBertForSequenceClassification, of(hf.ModernBertConfig, MODERNBERT | LABELS), drops=True
    ),
    "modernbert-labels-mean": Case(
        hf.ModernBertForSequenceClassification,
        of(hf.ModernBertConfig, MODERNBERT | LABELS, classifier_pooling="mean", classifier_bias=True),
        drops=True,
    ),
    "t5": Case(hf.T5ForConditionalGeneration, of(hf.T5Config, T5), drops=True),
    "t5-1.1": Case(
        hf.T5ForConditionalGeneration,
        of(hf.T5Config, T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        drops=True,
        untie=True,
    ),
    "t5-few-buckets": Case(
        hf.T5ForConditionalGeneration,
        of(
            hf.T5Config,
            T5,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=12,
            feed_forward_proj="gated-silu",
        ),
        drops=True,
    ),
    "t5-bare": Case(hf.T5Model, of(hf.T5Config, T5), drops=True),
    "marian": Case(hf.MarianMTModel, of(hf.MarianConfig, MARIAN, scale_embedding=True), drops=True),
    "marian-relu": Case(hf.MarianMTModel, of(hf.MarianConfig, MARIAN, activation_function="relu"), drops=True),
    "bart": Case(hf.BartForConditionalGeneration, of(hf.BartConfig, BART)),
    "bart-scaled": Case(hf.BartForConditionalGeneration, of(hf.BartConfig, BART, scale_embedding=True)),
    "bart-bare": Case(hf.BartModel, of(hf.BartConfig, BART)),
}


# One of each family first.
FAMILIES = [
    "gpt2",
    "llama",
    "mistral-window",
    "qwen2",
    "qwen3",
    "bert-masked",
    "roberta-masked",
    "xlm-roberta-masked",
]
FAMILIES += [
    "distilbert-masked",
    "modernbert-masked",
    "t5",
    "marian",
    "bart",
    "gpt_neox",
    "olmo2",
    "gemma2",
    "gemma3",
    "phi3",
]
EACH_FAMILY = first_of([*FAMILIES, *(name for name in CASES if name not in FAMILIES)], len(FAMILIES))


class Float64Softmax:
    """Replaces torch in transformers' Gemma 2, whose softmax is in float32: the lowest float64 is -inf there."""

    def __getattr__(self, name: str) -> object:
        return torch.float64 if name == "float32" else getattr(torch, name)


def make(name: str) -> hf.PreTrainedModel:
    """Make a model with all tensors random, also biases and norms, which are initialized to 0 and 1."""
    case = CASES[name]
    torch.manual_seed(sum(name.encode()))
    model = case.model(case.config()).eval()
    with torch.no_grad():
        if case.untie:
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
        for key, tensor in model.state_dict().items():
            if "marian" in name and "embed_positions" in key:
                continue  # fixed sinusoids
            centre = 1.0 if key.endswith("weight") and tensor.dim() == 1 else 0.0  # a norm's scale
            if tensor.is_floating_point():
                # Modest, as a trained model's are: large ones sharpen every softmax and blow up the float32 rounding
                # of the reference's own norms past the tolerance of float64.
                tensor.normal_(centre, 0.2 if tensor.dim() < 2 else 0.7 / tensor.shape[-1] ** 0.5)
    return model
