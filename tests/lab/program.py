"""What a rank on a lab host runs: a slow load that says on disk when it is under way.

program.py URL FOLDER [TIMEOUT]         with a timeout, once FOLDER/go is there, with the ranks connected
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

import fastload
from fastload.errors import FastloadError, PeerError
from fastload.formats.state import state_digest


def main() -> None:
    url, folder, timeout = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"{rank}.ready").touch()
    while timeout and not (folder / "go").exists():
        time.sleep(0.02)

    def progress(done: int, total: int) -> None:
        if done > total // 8:
            (folder / f"{rank}.started").touch()

    timeout_s = float(timeout[0]) if timeout else 24.0
    options = fastload.LoadOptions(progress=progress, timeout_s=timeout_s, chunk_bytes=1 << 20)
    end: dict[str, object]
    try:
        with fastload.open(url, options=options) as checkpoint:
            tensors = checkpoint.load()
        assert checkpoint.report is not None
        end = {"digest": state_digest(tensors), "ranks": [asdict(own) for own in checkpoint.report.ranks]}
    except FastloadError as error:
        failures = error.failures if isinstance(error, PeerError) else {}
        end = {"error": type(error).__name__, "failures": sorted(failures), "text": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
