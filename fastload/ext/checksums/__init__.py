"""Checksums of checkpoints that other programs wrote."""
