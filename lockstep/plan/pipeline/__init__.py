"""Plans that cut a model into stages: where to cut, in which order to run, what it costs.

Entry points: ``pipelines`` (the maker), ``schedules`` (GPipe, 1F1B, zero-bubble;
``interleaving`` where a rank holds several stages) and ``simulation``.
"""
