"""Checkpoints in repositories of the Hugging Face hub: URLs of the scheme ``hf``."""
