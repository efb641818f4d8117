"""Policies of a `CheckpointManager`: when to save, and which checkpoints to keep."""

from fastload.training.interval import EndedSave, IntervalPolicy, Measured, SavePolicy
from fastload.training.retention import KeepPolicy, Retention, SavedCheckpoint

__all__ = [
    "EndedSave",
    "IntervalPolicy",
    "KeepPolicy",
    "Measured",
    "Retention",
    "SavePolicy",
    "SavedCheckpoint",
]
