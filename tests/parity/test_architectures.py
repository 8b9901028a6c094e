"""Models of transformers as they are: cut in two, or divided inside layers, and the same as one
device to 1e-12 in fp64.

One of each way to go through a model; ``bench/architectures.py`` tries all of them.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import lockstep
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

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


def make(name: str) -> tuple[nn.Module, Any]:
    """A model and its data."""
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name])).train()
    tokens = torch.randint(3, 31, (7, 8))
    padding = (torch.arange(8) < torch.tensor([[8], [8], [5], [6], [8], [4], [7]])).long()
    return model, ({"input_ids": tokens, "attention_mask": padding}, tokens)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", core_of(MODELS, ["BartForConditionalGeneration"], []))
def test_a_model_as_it_is_trains_in_two_stages(name: str) -> None:
    model, data = make(name)
    strategy = lockstep.PipelineStrategy(2, microbatches=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = lockstep.Job(model, loss, optimizer, data, batch_size=4)
    report = lockstep.verify(job, strategy, steps=3)
    assert report.passed, str(report)
    assert not report.undivided
    plan = strategy.plan(model, batch_size=4, sample=data)
    assert not [note for note in plan.notes if "one piece" in note]
    assert len(plan.layers) > 10


@pytest.mark.parametrize("name", core_of(MODELS, ["BertForMaskedLM"]))
def test_a_model_as_it_is_is_divided_inside(name: str) -> None:
    model, data = make(name)
    strategy = lockstep.TensorParallelStrategy(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = lockstep.Job(model, loss, optimizer, data, batch_size=4)
    report = lockstep.verify(job, strategy, steps=2)
    assert report.passed, str(report)
    splits = strategy.plan(model, batch_size=4, sample=data).tensor
    assert splits is not None
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    assert sum(sizes[one.name] for one in splits.parameters) > 0.8 * sum(sizes.values())
    gathered = {one.gathered_for for one in splits.parameters}
    assert gathered <= {"", "the model's output", "layer_norm"}
