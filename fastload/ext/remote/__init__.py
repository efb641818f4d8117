"""Storages that need other packages: object stores and HTTP, and the Hugging Face hub."""
