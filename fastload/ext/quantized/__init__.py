"""Quantised weights, loaded as floating point tensors."""
