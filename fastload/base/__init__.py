"""Threads, memory, devices, stopwatches and the registry of extensions."""
