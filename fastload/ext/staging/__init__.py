"""A copy of a checkpoint on every host."""
