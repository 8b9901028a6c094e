"""``fit(batch_size="auto")``: finds the batch size with the most samples per second.

Entry point: ``batch_size``. Sizes are tried in processes of their own (``trial_process``), which
may run out of memory; results are cached per machine.
"""
