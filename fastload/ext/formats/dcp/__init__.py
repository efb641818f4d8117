"""Directories of ``torch.distributed.checkpoint``."""
