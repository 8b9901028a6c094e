"""What a Plan costs: the time of a step and the peak memory of each rank, by part.

Entry point: ``plan_cost.cost_of``. ``profile`` has a model's costs as sums over its layers,
``placement`` the devices of the ranks and the links between them, ``staged`` and ``divided`` the
closed forms. Not here: the choice among Plans (``plan.search``), and measurements (``capture``).
"""
