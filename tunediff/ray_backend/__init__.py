"""The search in Ray: Ray Tune drives Optuna, Ray Train runs the workers.

Importing this package sets Ray's environment, before Ray reads it; what the user has set stays.
"""

import json
import os

from tunediff.core.environment import RAY_BEFORE

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere unasked
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that outlives the connection must start no cluster
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of the user keep their meaning
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process more per group
    # how soon a dead worker is noticed; lower costs CPU while training
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1.0",
    # under `uv run` Ray would start every worker through uv again
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # a process without a GPU share leaves CUDA_VISIBLE_DEVICES alone
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # at Ray's 15 the training yields to Ray's own housekeeping: 7 % slower on 2 cores
    "RAY_worker_niceness": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours: it must not look like early stopping
    # our journal, not Tune's snapshot, is the truth
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that failed has no objective
}
_users = {name: text for name, text in os.environ.items() if name.startswith("RAY_")}
os.environ.setdefault(RAY_BEFORE, json.dumps(_users))
for _name, _value in _RAY_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
