"""Predictions of loads and saves on a cluster, and an examination of its hosts."""
