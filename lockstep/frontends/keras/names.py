"""What a model of a scope has of its own, before what its class has."""

METHODS = (
    "evaluate",
    "fit",
    "predict",
    "predict_on_batch",
    "test_on_batch",
    "train_on_batch",
)
