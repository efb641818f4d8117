"""Loading a checkpoint: what `fastload.load`, `fastload.open` and `fastload.inspect` do."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from fastload.errors import CheckpointNotFound, FastloadError, OptionError, PlanMismatch, WorldError
from fastload.formats.manifest import Manifest
from fastload.formats.safetensors import read_header_digest, read_manifest
from fastload.loading.exchange import Exchange, has_nccl, open_exchange
from fastload.loading.match import Match, match
from fastload.loading.pipeline import Pipeline, read_threads
from fastload.loading.place import Placer
from fastload.loading.plan import ReadPlan, plan_reads
from fastload.loading.read import ChunkReader
from fastload.options import LoadOptions
from fastload.report import LoadReport, RankReport
from fastload.storage import Storage, open_storage
from fastload.world import World, join
