"""Names of settings and options in other tools, and their names here.

None is an alias: a setting, keyword or flag under one of these names is an error that gives the name to use. A remark
after a comma says how the value differs.
"""

from __future__ import annotations


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: ours for ours, names in table.items() for name in names.split()}


# A model: nanoGPT, transformers, torch.nn, TransformerLens.
SPEC = _by_name(
    {
        "d_model": "n_embd hidden_size embed_dim embedding_dim dim model_dim",
        "n_layers": "n_layer num_layers num_hidden_layers n_blocks depth",
        "n_heads": "n_head num_heads num_attention_heads nhead",
        "n_kv_heads": "n_kv_head num_kv_heads num_key_value_heads n_query_groups",
        "d_head": "head_dim head_size d_k kv_channels",
        "d_ff": "intermediate_size ffn_dim n_inner d_mlp dim_feedforward hidden_dim",
        "max_len": (
            "block_size n_ctx n_positions max_position_embeddings seq_len context_length max_seq_len"
            " max_seq_length max_length"
        ),
        "vocab_size": "n_vocab d_vocab padded_vocab_size",
        "feedforward": "act_fn activation activation_function hidden_act",
        "norm_placement, one of pre, post, sandwich, output and parallel": (
            "norm_first pre_norm norm_order parallel_attn use_parallel_residual"
        ),
        "norm": "norm_type normalization normalization_type",
        "norm.eps": "layer_norm_eps layer_norm_epsilon norm_eps rms_norm_eps",
        "position": "position_embedding_type pos_emb positional_encoding",
        "position.theta": "rope_theta rope_base rotary_base",
        "position.scaling": "rope_scaling",
        "position.fraction": "partial_rotary_factor rotary_pct rotary_percent",
        "head.tied": "tie_embeddings tie_weights tie_word_embeddings weight_tying",
        "qkv_bias, with out_bias and ffn_bias as well": "bias use_bias",
        "qkv_bias": "attention_bias add_bias_kv",
        "attention_dropout": "attn_pdrop attention_probs_dropout_prob attn_dropout",
        "dropout": "hidden_dropout_prob resid_pdrop residual_dropout",
        "embed_dropout": "embd_pdrop embedding_dropout",
        "attention_softcap": "attn_logit_softcapping softcap",
        "logit_softcap": "final_logit_softcapping",
        "windows, one size for each layer in turn": "sliding_window window_size",
        "qk_norm": "qk_layernorm use_qk_norm",
        "init.std": "init_std initializer_range",
        "start_id": "bos_id bos_token_id decoder_start_token_id",
        "end_ids, a list": "eos_id eos_token_id",
        "pad_id": "padding_idx pad_token_id",
        "head.n_labels": "num_labels n_classes num_classes",
    }
)

# A run: nanoGPT, transformers' Trainer, Lightning, torchtitan.
RUN = _by_name(
    {
        "train.lr": "learning_rate max_lr base_lr",
        "train.optimizer.weight_decay": "weight_decay wd",
        "train.optimizer.beta1, with beta2 as well": "adam_beta1 beta1 betas",
        "train.optimizer.beta2": "adam_beta2 beta2",
        "train.optimizer.eps": "adam_epsilon eps",
        "train.optimizer": "optim optimizer_name",
        "train.batch_tokens, counted in tokens: sequences times data.seq_len": (
            "batch_size global_batch_size per_device_train_batch_size train_batch_size"
        ),
        "train.grad_accum, the micro-batches of a step": "micro_batch_size per_device_batch_size",
        "train.steps": "max_iters max_steps num_steps iters lr_decay_iters",
        "train.minutes": "max_time time_limit time_budget",
        "train.epochs": "num_train_epochs max_epochs num_epochs n_epochs",
        "train.grad_accum": (
            "accumulate_grad_batches gradient_accumulation_steps grad_accum_steps parts accumulation_steps"
        ),
        "train.precision": "bf16 fp16 fp32 amp dtype torch_dtype mixed_precision compute",
        "train.activation_checkpointing": "gradient_checkpointing activation_recomputation recompute",
        "train.ema, the decay": "ema_decay use_ema average",
        "train.grad_clip": "clip clip_grad_norm gradient_clip_val max_grad_norm max_norm",
        "train.label_smoothing": "label_smoothing_factor smoothing",
        "train.schedule.warmup": "warmup warmup_iters warmup_steps num_warmup_steps",
        "train.schedule": "decay_lr lr_schedule lr_scheduler lr_scheduler_type scheduler",
        "train.schedule.final_factor, a fraction of train.lr": "min_lr lr_min min_lr_ratio",
        "train.on_nonfinite, stop or skip": "detect_anomaly trouble skip_nan",
        "train.save_every": "checkpoint_interval save_interval save_steps every_n_train_steps",
        "train.eval_every": "eval_interval eval_steps val_check_interval",
        "train.eval_samples, counted in samples": "eval_iters limit_val_batches max_eval_samples",
        "train.keep_checkpoints": "keep save_top_k save_total_limit",
        "train.keep_snapshots": "history",
        "train.sample_prompts": "samples",
        "train.patience": "early_stopping early_stopping_patience",
        "train.workers": "dataloader_num_workers num_workers",
        "train.out": "default_root_dir out_dir output_dir run_dir",
        "train.trackers, such as wandb,mlflow": "log_wandb log_with loggers report_to use_wandb wandb wandb_log",
        "train.device": "accelerator use_cuda",
        "train.compile": "compile_model torch_compile",
        "train.lora.rank": "lora_r lora_rank",
        "train.lora.alpha": "lora_alpha",
        "train.lora.targets": "lora_target_modules target_modules",
        "train.lora.weights, which is int4": "load_in_4bit qlora use_qlora",
        "train.lora.weights, int8 or int4": "load_in_8bit quantization quantization_bit quantization_config quantize",
        "train.parallel.kind": "data_parallel ddp fsdp sharding_strategy strategy",
        "train.parallel.tensor": "tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size tp_size",
        "train.seed": "manual_seed random_seed seed_everything",
        "data.seq_len": (
            "block_size context_length max_length max_seq_len max_seq_length length n_ctx sequence_length seq_length"
        ),
        "data.val_fraction": "hold_out test_size val_ratio val_size val_split validation_split",
        "data.columns": "column_names fields text_column",
        "data.path": "data_dir data_path dataset dataset_path train_file",
        "data.validation": "eval_file val_data val_path validation_file",
        "data.tokenizer": "tokenizer_name tokenizer_path",
        "model.from": "init_from model_name_or_path pretrained pretrained_model",
        "train.optimizer.adamw": "rest",
        "train.schedule.final_factor": "end",
        "train.schedule.decay_fraction": "decay",
    }
)

# Generation: transformers' generate, vLLM, the OpenAI client.
GENERATION = _by_name(
    {
        "max_new_tokens": "max_length max_tokens max_completion_tokens num_tokens",
        "min_new_tokens": "min_length min_tokens",
        "beams": "beam_size beam_width n_beams num_beams",
        "n": "best_of num_return_sequences num_samples",
        "temperature, which is 0 for greedy decoding": "do_sample greedy",
        "stop": "stop_sequences stop_strings stop_words",
        "stop_token_ids, a list": "eos_token_id stop_ids",
        "early_stopping": "early_stop",
        "seed": "random_seed",
        "slots": "batch_size max_num_seqs",
        "max_len": "max_model_len max_seq_len max_seq_length context_length",
        "draft_model": "assistant_model speculative_model",
        "prompt_lookup": "ngram prompt_lookup_num_tokens",
        "int8": "load_in_8bit quantize quantization",
        "int4": "load_in_4bit",
    }
)

# Sites: the hooks of TransformerLens, without `blocks.3.` or `encoder.3.` in front; ours take the layer at the end.
SITES = _by_name(
    {
        "resid_pre": "hook_resid_pre",
        "resid_mid": "hook_resid_mid",
        "resid_post": "hook_resid_post",
        "attn_out": "hook_attn_out",
        "ffn_out": "hook_mlp_out",
        "q": "attn.hook_rot_q",
        "k": "attn.hook_rot_k",
        "q, after norm and rotation": "attn.hook_q",
        "k, after norm and rotation": "attn.hook_k",
        "v": "attn.hook_v",
        "z": "attn.hook_z",
        "scores": "attn.hook_attn_scores",
        "pattern": "attn.hook_pattern",
        "hidden": "mlp.hook_post",
        "cross_q": "cross_attn.hook_q",
        "cross_k": "cross_attn.hook_k",
        "cross_v": "cross_attn.hook_v",
        "cross_z": "cross_attn.hook_z",
        "cross_scores": "cross_attn.hook_attn_scores",
        "cross_pattern": "cross_attn.hook_pattern",
        "cross_attn_out": "hook_cross_attn_out",
        "result": "attn.hook_result",
        "attn_norm, after scale and shift": "ln1.hook_normalized",
        "ffn_norm, after scale and shift": "ln2.hook_normalized",
        "attn_norm_scale": "ln1.hook_scale",
        "ffn_norm_scale": "ln2.hook_scale",
        "hidden_pre": "mlp.hook_pre_linear",
        "hidden_pre, or gate with a gate": "mlp.hook_pre",
        "token_embed": "hook_embed",
        "final_norm_scale": "ln_final.hook_scale",
        "final": "unembed.hook_in",
        "final, after scale and shift": "ln_final.hook_normalized",
    }
)

# A dtype, as a value.
DTYPES = _by_name(
    {
        "bfloat16": "bf16 bf16-mixed bf16-true",
        "float16": "16 16-mixed 16-true amp fp16 half",
        "float32": "32 32-true float fp32",
        "float64": "64-true double fp64",
    }
)


def renamed(given: str, ours: str) -> str:
    """Return the sentence for a name from another tool.

    >>> renamed("train.learning_rate", RUN["learning_rate"])
    'train.learning_rate is called train.lr here.'
    >>> renamed("eos_token_id", SPEC["eos_token_id"])
    'eos_token_id is called end_ids here, a list.'
    """
    name, comma, remark = ours.partition(", ")
    return f"{given} is called {name} here{comma}{remark}."
