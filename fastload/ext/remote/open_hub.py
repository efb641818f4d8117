"""Opens URLs of the Hugging Face hub, where the packages are installed that this needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastload.options import Patience
from fastload.storage import Location, Storage, require_packages


def open_hub(location: Location, options: Mapping[str, Any], *, io: str, patience: Patience) -> Storage:
    """Opens a repository, or a directory or file in it; see `fastload.storage.StorageOpener`."""
    require_packages(location, "hub", "huggingface_hub", "obstore")
    from fastload.ext.remote.hub import HubStorage

    return HubStorage(location, options, io=io, attempt_s=patience.attempt_s)
