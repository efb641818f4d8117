"""fastload: every byte of a checkpoint is read once, and every rank ends with the whole state."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastload.api import async_save, inspect, load, open, save, stage, verify
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
    ReplicaMismatch,
    StorageError,
    WorldError,
)
from fastload.formats.manifest import FileEntry, Manifest, TensorEntry
from fastload.formats.per_rank import PerRank
from fastload.loading.checkpoint import Checkpoint
from fastload.options import LoadOptions, SaveOptions, StageOptions
from fastload.ranks import world
from fastload.report import (
    LoadReport,
    RankReport,
    SaveRankReport,
    SaveReport,
    StageRankReport,
    StageReport,
    VerifyReport,
)
from fastload.saving.handle import SaveHandle
from fastload.training.manager import CheckpointManager
from fastload.training.workers import worker_context

if TYPE_CHECKING:
    from fastload import estimate

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointManager",
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
    "PerRank",
    "PlanMismatch",
    "RankReport",
    "ReplicaMismatch",
    "SaveHandle",
    "SaveOptions",
    "SaveRankReport",
    "SaveReport",
    "StageOptions",
    "StageRankReport",
    "StageReport",
    "StorageError",
    "TensorEntry",
    "VerifyReport",
    "WorldError",
    "async_save",
    "estimate",
    "inspect",
    "load",
    "open",
    "save",
    "stage",
    "verify",
    "worker_context",
    "world",
]


def __getattr__(name: str) -> Any:
    """Imports the formulas when they are first used."""
    if name == "estimate":
        return import_module("fastload.estimate")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
