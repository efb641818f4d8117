"""Versions, and what the machine has."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fastload
from gpu_check_parts import mps
from gpu_check_parts.devices import Device
from gpu_check_parts.stages import Job

_PACKAGES = "numpy safetensors fsspec xxhash pytest hypothesis fastsafetensors runai-model-streamer".split()
_QUERY = "driver_version,pcie.link.gen.current,pcie.link.width.current,compute_mode,memory.free"
_ROOT = str(Path(__file__).resolve().parents[2])


def run(job: Job) -> None:
    """Looks everything up; what is not there is left out."""
    found: dict[str, Any] = {
        "fastload": f"{fastload.__version__} {_output('git', '-C', _ROOT, 'rev-parse', '--short', 'HEAD')}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "files": f"{job.folder.parent}, {_gib(shutil.disk_usage(job.folder).free)} free",
        "ulimit -l": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "MPS": "there" if mps.is_there() else f"no {mps.PROGRAM}",
        "C++ compiler": shutil.which("g++") or shutil.which("clang++") or "none",
        "environment": ", ".join(f"{k}={v}" for k, v in os.environ.items() if k.startswith(("NCCL", "CUDA"))),
    }
    for name, value in found.items():
        if value:
            job.results.fact(name, value)
    device = Device(job.kind)
    if job.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        job.results.fact("device", f"{properties.name}, {properties.multi_processor_count} SMs")
        job.results.fact("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        job.results.fact(_QUERY, _output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"))
    if (free := device.free_bytes()) is not None:
        job.results.fact("free memory of the device", _gib(free))
    ones = torch.ones(1000, device=device.device)
    job.results.check("the device computes", int(ones.sum().item()) == 1000)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,} bytes"
