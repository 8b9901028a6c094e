"""What Lockstep refuses, and may: by the words of its error."""

import re

REASONS = {
    "sparse gradients and averages": r"averages and float32 copies of the weights",
    "calls that change what is trained": r"a call must not change trained variables",
    "layers' losses in several shares": r"Layers that add losses, beside BatchNormalization",
    "a share's own loss of nothing": r"whose loss is NaN for a batch of weight 0 must return more",
    "units of shares that run together": r"Sharded parameters are gathered unit by unit",
    "a view and a change in place": r"changes the output of a divided layer in place",
    "models without divisible layers": r"No layer of this model can be divided",
    "slots in a file": r"`offload` has the optimizer step one part of the slots after the other",
    "hooks on parameters": r"Gradient hooks on parameters would see",
}


def reason_of(text: str) -> str | None:
    """The reason of an error, if it is known and documented."""
    return next((reason for reason, words in REASONS.items() if re.search(words, text)), None)
