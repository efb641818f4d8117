"""Tests for storages that others write, as base classes for pytest."""

from fastload.ext.storage_tests import FILES, StorageContract, WritableStorageContract

__all__ = ["FILES", "StorageContract", "WritableStorageContract"]
