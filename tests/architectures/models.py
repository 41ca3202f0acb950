"""Sixty architectures of transformers, as small as their configurations allow, and a batch for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, BATCH, LENGTH, PICTURE = 128, 2, 8, 32

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "dim_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("ffn_dim", "dim_ff", "dff"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "dim_head"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "vocab_size": VOCABULARY,
    "n_vocab": VOCABULARY,
    "num_experts_per_tok": 2,
    "type_vocab_size": 2,
    "image_size": PICTURE,
    "patch_size": 8,
    "num_labels": 3,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


@dataclass(frozen=True)
class Architecture:
    """One class of models. `more` are settings that it needs beside those of SMALL."""

    name: str
    kind: str = "causal"
    """`causal`, `masked`, `seq2seq` or `picture`"""
    more: dict[str, Any] = field(default_factory=dict)
    padded: bool = False
    """Its first tokens are padding."""


def _all(kind: str, names: str) -> list[Architecture]:
    return [Architecture(name, kind) for name in names.split()]


ARCHITECTURES = [
    *_all(
        "causal",
        "gpt2 gpt_neox gpt_bigcode opt bloom llama mistral mixtral gemma gemma2 gemma3_text qwen2 qwen2_moe qwen3 "
        "qwen3_moe phi phi3 mpt stablelm olmo olmo2 olmoe cohere granite persimmon ctrl xglm biogpt openai-gpt glm4 "
        "nemotron smollm3 apertus ernie4_5 exaone4 mamba rwkv gpt_oss jetmoe diffllama bitnet lfm2 nanochat",
    ),
    Architecture("cpmant", padded=True),
    *_all("masked", "bert albert distilbert electra deberta-v2 convbert mpnet squeezebert roformer modernbert"),
    *_all("seq2seq", "mt5 bart pegasus marian"),
    *_all("picture", "vit dinov2"),
]

_AUTO = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "picture": transformers.AutoModelForImageClassification,
}


def model_of(architecture: Architecture, dtype: torch.dtype) -> nn.Module:
    """A new model with random weights of a fixed seed, in training mode."""
    config = transformers.AutoConfig.for_model(architecture.name)
    known = {name: value for name, value in SMALL.items() if hasattr(config, name)}
    tokens = {name: value for name, value in TOKENS.items() if getattr(config, name, None) is not None}
    config = transformers.AutoConfig.for_model(architecture.name, **{**known, **tokens, **architecture.more})
    torch.manual_seed(0)
    model = _AUTO[architecture.kind].from_config(config, attn_implementation="eager")
    return model.to(dtype).train()


def inputs_of(architecture: Architecture, model: nn.Module, dtype: torch.dtype, step: int) -> dict[str, Any]:
    """A batch that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    if architecture.kind == "picture":
        channels = getattr(model.config, "num_channels", 3)
        return {
            "pixel_values": torch.rand(BATCH, channels, PICTURE, PICTURE, generator=generator).to(dtype),
            "labels": torch.randint(0, 3, (BATCH,), generator=generator),
        }
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if architecture.padded:
        ids[0, :3] = 0
    labels = ids.clone()
    return {"input_ids": ids, "labels": labels}
