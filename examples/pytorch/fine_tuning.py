"""Hugging Face: a model learns to tell good reviews from bad ones, on two devices.

    python fine_tuning.py [--epochs 3] [--model distilbert-base-uncased]

Without --model it is a tiny BERT with random weights, and nothing is downloaded. If you
used transformers.Trainer, TrainingArguments become arguments of lockstep.Trainer and fit; the
model, its own loss and the dataset stay unchanged. Needs transformers and datasets.
"""

import argparse
import random
from functools import partial

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

import lockstep

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--model", help="a name on the Hub")
options = parser.parse_args()

# Reviews: "the plot was not bad" is a good one.
random.seed(0)
logging.disable_progress_bar()
things = ["plot", "acting", "music", "ending", "camera", "cast"]
words = {
    "great": 1,
    "lovely": 1,
    "clever": 1,
    "good": 1,
    "bad": 0,
    "dull": 0,
    "awful": 0,
    "weak": 0,
}
texts, labels = [], []
for _ in range(2_000):
    thing, word, negation = (
        random.choice(things),
        random.choice([*words]),
        random.choice(["", "not "]),
    )
    texts.append(f"the {thing} was {negation}{word}")
    labels.append(1 - words[word] if negation else words[word])

torch.manual_seed(0)
if options.model:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
else:
    vocabulary = ["[PAD]", "[UNK]", "the", "was", "not", *things, *words]
    level = models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(level), pad_token="[PAD]")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(vocabulary), intermediate_size=64, **sizes)
    )


dataset = Dataset.from_dict({**tokenizer(texts, padding=True), "labels": labels})
parts = dataset.with_format("torch").train_test_split(test_size=400, seed=0)

trainer = lockstep.Trainer(
    model,
    loss=lockstep.OwnLoss(),  # the model's, from its output
    optimizer=partial(torch.optim.AdamW, lr=5e-4 if options.model is None else 5e-5),
    strategy=lockstep.MirroredStrategy(devices=2),
    clip_norm=1.0,
)
trainer.fit(parts["train"], epochs=options.epochs, batch_size=32, validation_data=parts["test"])

logits = trainer.predict(parts["test"].remove_columns("labels"))["logits"]
right = logits.argmax(1) == torch.as_tensor(parts["test"]["labels"][:])
print(f"{right.float().mean():.1%} of {len(right)} held-out reviews are understood")
model.save_pretrained("reviews_model")
print("written: reviews_model, which from_pretrained loads")
