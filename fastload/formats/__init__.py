"""Checkpoint formats: which bytes of which files are which tensor."""
