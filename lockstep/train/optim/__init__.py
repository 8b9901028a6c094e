"""torch optimizers that step on pieces of parameters, and what surrounds their step.

Entry point: ``updaters``. ``update_config`` holds what a training does to gradients and weights
besides the optimizer's own rule (clipping, accumulation, averages); ``learning_rates`` has the
schedules. Gradients are summed elsewhere (``comm.collectives``).
"""
