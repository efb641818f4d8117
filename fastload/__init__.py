"""Collective checkpoint loading for multi-rank PyTorch jobs."""
