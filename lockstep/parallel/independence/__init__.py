"""Tests whether a batch may be divided, on a few samples, before the first step.

Entry points: ``sample_independence`` (a sample's outputs and gradients must not depend on the rest
of its batch), ``loss_trial`` (the loss of a batch must come from the losses of its shares) and
``reduction_trial`` (is it a mean?). ``parallel.loss.reduction_inference`` infers the reduction from
the operations.
"""
