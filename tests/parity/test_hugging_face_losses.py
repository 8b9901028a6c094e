"""Language models of transformers, which average over the labels that count: no options needed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import lockstep
from lockstep.strategies.base import Strategy
from tests.thorough import core_of

pytestmark = pytest.mark.thorough

VOCABULARY, NUM_TOKENS, WIDTH = 61, 10, 16


def shifted_loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """transformers' own, but for its cast to float32, which hides differences below 1e-7."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gpt2() -> nn.Module:
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=NUM_TOKENS,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.loss_function = shifted_loss
    return model


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=NUM_TOKENS,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.loss_function = shifted_loss
    model.model.norm = nn.RMSNorm(WIDTH)  # transformers' own compute in float32
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = (
            nn.RMSNorm(WIDTH),
            nn.RMSNorm(WIDTH),
        )
    return model


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=NUM_TOKENS,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert}
STRATEGIES: dict[str, Strategy] = {
    "mirrored-2": lockstep.MirroredStrategy(2),
    "mirrored-3": lockstep.MirroredStrategy(3),
    "pipeline-2": lockstep.PipelineStrategy(2, microbatches=2),
    "data-2-pipe-2": lockstep.HybridStrategy(data=2, pipe=2, microbatches=2),
}


def padded(num_samples: int = 24) -> dict[str, Tensor]:
    """Sequences of all lengths; early ones are short."""
    generator = Generator().manual_seed(31)
    tokens = torch.randint(VOCABULARY, (num_samples, NUM_TOKENS), generator=generator)
    lengths = 2 + torch.arange(num_samples)[:, None] % (NUM_TOKENS - 1)
    mask = (torch.arange(NUM_TOKENS) < lengths).long()
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("name", "strategy"),
    core_of(
        [(name, strategy) for name in MODELS for strategy in STRATEGIES],
        lambda name, strategy: (
            (name, strategy)
            in (("gpt2", "mirrored-2"), ("llama", "pipeline-2"), ("bert", "mirrored-2"))
        ),
    ),
)
def test_training_equals_one_device(name: str, strategy: str) -> None:
    torch.manual_seed(32)
    job = lockstep.Job(
        model=MODELS[name](),
        loss=lockstep.OwnLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=padded(),
        batch_size=10,
    )
    report = lockstep.verify(job, STRATEGIES[strategy], steps=3)
    assert report.passed, str(report)
    assert not report.undetermined
