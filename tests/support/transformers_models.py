"""Small models of transformers, with two layers and 32 features."""

from typing import Any

import pytest
import torch
from torch import nn

SIZE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT: dict[str, Any] = {"vocab_size": 99, "use_cache": False}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
IDS = torch.randint(5, 90, (4, 7), generator=torch.Generator().manual_seed(0))


def build(family: str, kind: str, **settings: Any) -> nn.Module:
    """A model such as `LlamaForCausalLM`."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{family}{kind}")(getattr(transformers, f"{family}Config")(**settings))


def llama(kind: str = "ForCausalLM", **settings: Any) -> nn.Module:
    return build("Llama", kind, **{**SIZE, **TEXT, "num_key_value_heads": 2, **settings})


def bert(kind: str = "ForSequenceClassification") -> nn.Module:
    return build("Bert", kind, **SIZE, vocab_size=99)


def bart(kind: str = "ForConditionalGeneration", **settings: Any) -> nn.Module:
    return build("Bart", kind, **SEQ2SEQ, **TEXT, **settings)


def gpt2(kind: str = "LMHeadModel", **settings: Any) -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
    return build("GPT2", kind, **sizes, **TEXT, **settings)


def t5(family: str = "T5", **settings: Any) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return build(family, "ForConditionalGeneration", **{**sizes, **tokens, **TEXT, **settings})


def whisper() -> nn.Module:
    """A model of speech, which takes `SPEECH`."""
    sizes = {f"{part}_{kind}": 2 for part in ("encoder", "decoder") for kind in ("layers", "attention_heads")}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8}
    sizes |= {"max_source_positions": 20, "max_target_positions": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    return build("Whisper", "ForConditionalGeneration", **sizes, **tokens, **TEXT)


SPEECH = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": IDS[:2, :5]}
