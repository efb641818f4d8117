"""Threads, memory, devices, stopwatches and traces."""
