"""Detects another distribution that has a package of the same name."""

from __future__ import annotations

import glob
import os

_REMEDY = "pip uninstall -y fastload fastload-torch && pip install fastload-torch"


def require_alone() -> None:
    """Raises if the distribution ``fastload``, a file downloader, is installed next to this package.

    Each of the two overwrites files of the other, and deletes them when it is uninstalled.

    Raises:
        ImportError: It is installed in the same directory.
    """
    site = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if glob.glob(os.path.join(glob.escape(site), "fastload-*.dist-info")):
        raise ImportError(
            f"{site} has both fastload-torch and fastload, another project (a downloader of files), and "
            f"each has overwritten files of the other. Install one of them alone: {_REMEDY}"
        )
