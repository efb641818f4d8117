"""Versions of fastload and of the protocol between ranks, and a check of the installation."""

from __future__ import annotations

import glob
import os

__version__ = "0.2.0"
"""The next release, with ``.dev0`` until it is made. The first commit after a release names the next one."""

PROTOCOL = 12
"""Incremented by each commit that changes messages between ranks, or values that all ranks compute alike,
such as plans of transfers and layouts of files."""


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
