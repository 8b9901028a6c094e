"""Trials of batch sizes that measure for a moment only; to be imported where they run."""

from lockstep.train.trials import trial_process

trial_process._MEASURED_SECONDS = 0.05
