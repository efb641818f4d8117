"""Checkpoints of a training: when, how many, which one to go on with."""
