"""Checkpoints served over HTTP, and hosts that have a checkpoint as sources of its bytes."""
