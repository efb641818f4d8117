"""Several ranks on one NVIDIA GPU: each is a host to NCCL, and the data goes through its sockets.

It shows whether results and the order of calls are right, not how fast anything is.
"""

from __future__ import annotations

import os

__all__ = ["SWITCH", "enter", "is_on", "num_gpus_for"]

SWITCH = "FASTLOAD_TEST_ONE_GPU"  # environment: 1 has the ranks of a test share the first CUDA device

# The kernels of all communicators have to fit on the device at once: few blocks, and small buffers.
_VARIABLES = {
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "=lo",  # exactly this one
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    "NCCL_BUFFSIZE": "1048576",
    "NCCL_MAX_CTAS": "2",
    "GLOO_SOCKET_IFNAME": "lo",
}


def is_on() -> bool:
    """Whether ranks share the first CUDA device."""
    return os.environ.get(SWITCH) == "1"


def num_gpus_for(world: int) -> int:
    """Returns how many CUDA devices so many ranks need."""
    return 1 if is_on() else world


def enter(rank: int) -> None:
    """Puts a rank on the first CUDA device, before its process first calls CUDA or NCCL.

    NCCL refuses two ranks with one host id on one device, and reads the id once in each process.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
