"""Storages other than local files: object stores and HTTP, the Hugging Face hub, what fsspec supports."""
