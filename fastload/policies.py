"""Policies of a `CheckpointManager`: when to save, and which checkpoints to keep."""

from fastload.training.interval import EndedSave, Measured, SavePolicy
from fastload.training.retention import KeepPolicy, Retention, SavedCheckpoint

__all__ = ["EndedSave", "KeepPolicy", "Measured", "Retention", "SavePolicy", "SavedCheckpoint"]
