"""Built-in dropout of transformers, and residual dropout for decoders that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookdrop import InjectionError, LayerError
from hookdrop.recipes import report_dropout, residual_dropout, set_dropout
from tests.support.dropout_models import (
    SIZE,
    TOKENS,
    ArbitraryNames,
    Inherited,
    OverriddenMethod,
    RenamedSelf,
    SubmoduleRate,
    TwoRates,
    bert,
    gpt2,
    llama,
    transformers,
)


def lora(lora_dropout: float) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, num_key_value_heads=2, vocab_size=50))
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], lora_dropout=lora_dropout))


class TestReportDropout:
    def test_rate_read_from_the_config_is_out_of_reach(self) -> None:
        config = transformers.Wav2Vec2Config(**SIZE, conv_dim=(16,), conv_stride=(2,), conv_kernel=(2,), layerdrop=0.1)
        report = report_dropout(transformers.Wav2Vec2Model(config))
        assert report.out_of_reach == {"Wav2Vec2Encoder.forward reads config.layerdrop": ["encoder"]}


class TestSourceAnalysis:
    @pytest.mark.parametrize(
        "model", [ArbitraryNames(), SubmoduleRate(), RenamedSelf(), OverriddenMethod(), Inherited(0.1), TwoRates()]
    )
    def test_changeable_rates_are_not_out_of_reach(self, model: nn.Module) -> None:
        assert report_dropout(model).out_of_reach == {}

    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
    def test_lora_dropout_is_listed(self) -> None:
        """PEFT calls it as `dropout = self.lora_dropout[name]; dropout(x)`."""
        model = lora(0.1)
        report = report_dropout(model)
        names = [rate.name for rate in report.rates if rate.value]
        assert names == [f"model.layers.{i}.self_attn.q_proj.lora_dropout.default" for i in (0, 1)]
        assert report.out_of_reach == {}


class TestSetDropout:
    def test_state_dict_and_config_do_not_change(self) -> None:
        model = llama(attention_dropout=0.3)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        set_dropout(model, 0.5)
        assert model.config.attention_dropout == 0.3
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
    "Qwen2": {"num_key_value_heads": 2},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "Olmo2": {"num_key_value_heads": 2},
    "Phi": {},
    "GPTNeoX": {},
    "Cohere": {"num_key_value_heads": 2},
}


class TestResidualDropout:
    @pytest.mark.parametrize("name", DECODERS)
    @pytest.mark.filterwarnings("ignore:.*token_id")
    def test_rate_1_drops_exactly_what_a_layer_adds(self, name: str) -> None:
        config = getattr(transformers, f"{name}Config")(**SIZE, vocab_size=50, pad_token_id=0, **DECODERS[name])
        model = getattr(transformers, f"{name}Model")(config).train()
        drop = residual_dropout(model, p=1.0)
        states = model(**TOKENS, output_hidden_states=True).hidden_states
        assert len(drop.sites) == 4
        assert torch.equal(states[1], states[0])
        drop.remove()
        states = model(**TOKENS, output_hidden_states=True).hidden_states
        assert not torch.equal(states[1], states[0])

    def test_measured_rate_is_p(self) -> None:
        model = llama().train()
        drop = residual_dropout(model, p=0.3)
        measured = drop.probe(torch.randint(0, 50, (8, 64)))
        assert measured.dropped == pytest.approx(0.3, abs=0.01)  # of 65,536 elements: 5 standard errors

    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
    @pytest.mark.parametrize("lora_dropout", [0.0, 0.1])
    def test_decoder_inside_a_peft_model_is_found(self, lora_dropout: float) -> None:
        assert residual_dropout(lora(lora_dropout)).sites[0].name.endswith("layers.0.self_attn")

    def test_model_with_dropout_raises(self) -> None:
        with pytest.raises(InjectionError, match=r"already has dropout: h\.0\.attn\.resid_dropout is 0\.1") as excinfo:
            residual_dropout(gpt2())
        assert "set_dropout" in str(excinfo.value)

    def test_model_with_dropout_at_0_is_accepted(self) -> None:
        assert len(residual_dropout(gpt2(resid_pdrop=0.0, embd_pdrop=0.0)).sites) == 4

    def test_model_with_attention_dropout_is_accepted(self) -> None:
        assert residual_dropout(llama(attention_dropout=0.1)).sites

    def test_encoder_raises(self) -> None:
        with pytest.raises(LayerError, match="found no matching layer in BertModel"):
            residual_dropout(bert())
