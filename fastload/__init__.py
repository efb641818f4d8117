"""fastload: every byte of a checkpoint is read once, and every rank ends with the whole state."""

from fastload.api import inspect, load, open, verify
from fastload.checkpoint import Checkpoint
from fastload.errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    ChecksumError,
    DeadlineExceeded,
    FastloadError,
    IncompleteCheckpoint,
    ManifestError,
    MismatchError,
    OptionError,
    PeerError,
    PlanMismatch,
    StorageError,
    WorldError,
)
from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.options import LoadOptions
from fastload.report import LoadReport, RankReport, VerifyReport

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointNotFound",
    "ChecksumError",
    "DeadlineExceeded",
    "FastloadError",
    "FileEntry",
    "IncompleteCheckpoint",
    "LoadOptions",
    "LoadReport",
    "Manifest",
    "ManifestError",
    "MismatchError",
    "OptionError",
    "PeerError",
    "PlanMismatch",
    "RankReport",
    "StorageError",
    "TensorEntry",
    "VerifyReport",
    "WorldError",
    "inspect",
    "load",
    "open",
    "verify",
]
