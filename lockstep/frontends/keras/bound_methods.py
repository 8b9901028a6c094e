"""Names of the methods that a model made or compiled in a scope overrides."""

METHODS = (
    "evaluate",
    "fit",
    "predict",
    "predict_on_batch",
    "test_on_batch",
    "train_on_batch",
)
