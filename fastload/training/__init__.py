"""Checkpoints of a training: schedule, retention, restore."""
