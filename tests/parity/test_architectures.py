"""Models of transformers as they are: cut in two, and the same as one device to 1e-12 in fp64.

One of each way to go through a model; ``bench/architectures.py`` tries all of them.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import lockstep
from tests.thorough import core_of

_SIZES = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = {**_SIZES, "intermediate_size": 24, "max_position_embeddings": 16}
_GPT2 = {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
_BART = {
    "vocab_size": 31,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
}

MODELS = {
    "BertForMaskedLM": _BERT,
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": {**_BERT, "num_key_value_heads": 1},
    "BartForConditionalGeneration": _BART,
}


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.transpose(1, 2), target, reduction="none").mean(1)


@pytest.mark.parametrize("name", core_of(MODELS, ["BartForConditionalGeneration"]))
def test_a_model_as_it_is_trains_in_two_stages(name: str) -> None:
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name])).train()
    tokens = torch.randint(3, 31, (7, 8))
    padding = (torch.arange(8) < torch.tensor([[8], [8], [5], [6], [8], [4], [7]])).long()
    inputs = {"input_ids": tokens, "attention_mask": padding}
    strategy = lockstep.PipelineStrategy(2, microbatches=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = lockstep.Job(model, loss, optimizer, (inputs, tokens), batch_size=4)
    report = lockstep.verify(job, strategy, steps=3)
    assert report.passed, str(report)
    assert not report.undivided
    plan = strategy.plan(model, batch_size=4, sample=(inputs, tokens))
    assert not [note for note in plan.notes if "one piece" in note]
    assert len(plan.layers) > 10
