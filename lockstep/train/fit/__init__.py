"""What all ranks do in ``fit``, ``evaluate`` and ``predict``.

Entry points: ``fitting`` (one call of ``fit``, on rank 0) and ``fit_task`` (the loop of epochs and
steps, on every rank). ``forward_passes`` has evaluation and prediction, ``tasks`` what each rank
does there. Starting processes is ``train.runtime``; a step is ``parallel.worker``.
"""
