"""The contribution of a share's loss to the loss of the global batch.

Entry points: ``share_losses`` (a total and a weight), ``reduction_inference`` (is a scalar a mean
or a sum?) and ``whole_batch`` (any other loss, computed on all shares' outputs together).
``parallel.independence`` tests whether a batch may be divided at all.
"""
