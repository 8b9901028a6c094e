"""``fit(batch_size="auto")``: finds the batch size with the most samples per second.

Entry point: ``batch_size``. Sizes are tried in a process that may run out of memory
(``train.trials``); results are cached per machine.
"""
