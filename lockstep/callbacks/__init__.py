"""Callbacks that come with Lockstep. Pass them to the Trainer: ``callbacks=[...]``.

They run on rank 0, on the user's own objects, and use only the public ``lockstep.Callback``. A
package of an extra is imported when the callback that needs it is made.
"""

from lockstep.callbacks.best_weights import BestWeights
from lockstep.callbacks.csv_log import CSVLogger
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.lambda_callback import LambdaCallback
from lockstep.callbacks.learning_rate_finder import LearningRateFinder
from lockstep.callbacks.mlflow_log import MLflow
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.callbacks.profiler import Profiler
from lockstep.callbacks.tensorboard_log import TensorBoard
from lockstep.callbacks.wandb_log import WandB

__all__ = [
    "BestWeights",
    "CSVLogger",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateFinder",
    "MLflow",
    "ModelCheckpoint",
    "Profiler",
    "TensorBoard",
    "WandB",
]
