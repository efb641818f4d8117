"""fastload: every byte of a checkpoint is read once, and every rank ends with the whole state."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastload.base.version import require_alone

require_alone()  # before anything of a package whose files may be mixed

from fastload import world
from fastload.api import async_save, inspect, load, open, prefetch, save, verify
from fastload.base.registry import extension_module
from fastload.base.version import __version__ as __version__
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
    StateChanged,
    StorageError,
    UnsupportedVersion,
    WorldError,
)
from fastload.formats.manifest import FileEntry, Manifest, Piece, TensorEntry
from fastload.formats.state import PerRank
from fastload.geometry.box import Box
from fastload.loading.checkpoint import Checkpoint
from fastload.options import LoadOptions, SaveOptions
from fastload.report import (
    LoadReport,
    RankReport,
    SaveRankReport,
    SaveReport,
    VerifyReport,
)
from fastload.storage import FileStat, Folder, Storage, WritableStorage, register_storage

if TYPE_CHECKING:
    from fastload import estimate, policies
    from fastload.ext.checksums.api import seal
    from fastload.ext.hand_cut import Shard
    from fastload.ext.random_state import random_state
    from fastload.ext.redistribute import redistribute
    from fastload.ext.serve.api import Server, serve
    from fastload.ext.serve.peers import peers
    from fastload.ext.staging.api import stage
    from fastload.ext.staging.options import StageOptions
    from fastload.ext.staging.report import StageRankReport, StageReport
    from fastload.ext.streams.save import save_stream
    from fastload.ext.watch import Version, Watch, watch
    from fastload.ext.workers import worker_context
    from fastload.saving.background import SaveHandle
    from fastload.training.manager import CheckpointManager

__all__ = [
    "Box",
    "Checkpoint",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointManager",
    "CheckpointNotFound",
    "ChecksumError",
    "DeadlineExceeded",
    "FastloadError",
    "FileEntry",
    "FileStat",
    "Folder",
    "IncompleteCheckpoint",
    "LoadOptions",
    "LoadReport",
    "Manifest",
    "ManifestError",
    "MismatchError",
    "OptionError",
    "PeerError",
    "PerRank",
    "Piece",
    "PlanMismatch",
    "RankReport",
    "ReplicaMismatch",
    "SaveHandle",
    "SaveOptions",
    "SaveRankReport",
    "SaveReport",
    "Server",
    "Shard",
    "StageOptions",
    "StageRankReport",
    "StageReport",
    "StateChanged",
    "Storage",
    "StorageError",
    "TensorEntry",
    "UnsupportedVersion",
    "VerifyReport",
    "Version",
    "Watch",
    "WorldError",
    "WritableStorage",
    "async_save",
    "estimate",
    "inspect",
    "load",
    "open",
    "peers",
    "policies",
    "prefetch",
    "random_state",
    "redistribute",
    "register_storage",
    "save",
    "save_stream",
    "seal",
    "serve",
    "stage",
    "verify",
    "watch",
    "worker_context",
    "world",
]


_EXTENSIONS = "fastload.ext."
# Imported on first use.
_MODULES = {
    "CheckpointManager": "fastload.training.manager",
    "SaveHandle": "fastload.saving.background",
    "Server": "fastload.ext.serve.api",
    "Shard": "fastload.ext.hand_cut",
    "StageOptions": "fastload.ext.staging.options",
    "StageRankReport": "fastload.ext.staging.report",
    "StageReport": "fastload.ext.staging.report",
    "Version": "fastload.ext.watch",
    "Watch": "fastload.ext.watch",
    "peers": "fastload.ext.serve.peers",
    "random_state": "fastload.ext.random_state",
    "redistribute": "fastload.ext.redistribute",
    "seal": "fastload.ext.checksums.api",
    "save_stream": "fastload.ext.streams.save",
    "serve": "fastload.ext.serve.api",
    "stage": "fastload.ext.staging.api",
    "watch": "fastload.ext.watch",
    "worker_context": "fastload.ext.workers",
}


class _MissingExtension(OptionError, AttributeError):
    """What `hasattr` takes for a missing attribute."""


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name in ("estimate", "policies"):
        return import_module(f"fastload.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    if module.startswith(_EXTENSIONS):
        try:
            loaded = extension_module(module.removeprefix(_EXTENSIONS))
        except OptionError as error:
            raise _MissingExtension(str(error)) from None
    else:
        loaded = import_module(module)
    globals()[name] = getattr(loaded, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
