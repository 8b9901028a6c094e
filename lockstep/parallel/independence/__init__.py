"""Whether a batch may be divided: tried on a few samples, before the first step.

Entry points: ``sample_independence`` (a sample's outputs and gradients must not depend on the rest
of its batch), ``loss_trial`` (the loss of a batch must come from the losses of its shares) and
``reduction_test`` (is it a mean?). Reading the reduction from the operations is
``parallel.loss.reduction_inference``.
"""
