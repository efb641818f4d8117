"""Checkpoint formats: layout only, no transport."""
