"""Rules of the package that an import contract cannot express, read from the source itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fastload"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

MAX_ATTRIBUTES = 12  # that a class sets on itself: beyond, some of them belong together
# What may name them (an import for type checkers only is free: it does not happen).
DISTRIBUTED = {
    "ext/formats/convert.py",
    "ext/load_verify.py",
    "planning/doctor/facts.py",
    "integrations/dcp/common.py",
    "integrations/dcp/reader.py",
    "integrations/dcp/writer.py",
    "integrations/frameworks.py",
    "integrations/torchtitan.py",
    "integrations/vllm_refresh.py",
    "comm/group.py",
    "comm/launch.py",
    "comm/rendezvous.py",
    "transfer/communicators.py",
    "transfer/links.py",
}
ENVIRONMENT = {
    "planning/doctor/facts.py",
    "options.py",
    "comm/hosts.py",
    "comm/group.py",
    "comm/launch.py",
    "transfer/communicators.py",
    "transfer/links.py",
}
FILES = {
    "base/version.py",  # other distributions next to this one
    "base/memory.py",  # what the kernel says of memory
    "planning/doctor/facts.py",  # what it says of limits, networks and paths
    "integrations/accelerate.py",  # where others save
    "integrations/directory_save.py",
    "integrations/engines.py",  # what is a path, and not a name
    "integrations/frameworks.py",
    "integrations/lightning.py",  # links to checkpoints
    "integrations/megatron.py",  # what Megatron has begun
    "integrations/peft.py",
    "integrations/torchft.py",  # what it serves
    "integrations/trainer.py",
    "comm/hosts.py",  # what it says of itself, and of ports
    "ext/traces/tracing.py",  # what it writes
    "ext/streams/save.py",  # where it keeps tensors until it saves them
    "storage/destination.py",
    "storage/folders.py",
    "storage/local.py",
    "storage/local_target.py",
    "ext/memory/folder.py",
    "ext/memory/target.py",
    "ext/serve/access.py",  # tokens
    "ext/serve/checkpoints.py",  # what it serves
    "ext/staging/local_copy.py",
    "storage/mounts.py",  # what the system says of them
    "storage/pending.py",
    "storage/process.py",  # what it says of processes
    "ext/remote/s3.py",  # certificates
    "ext/remote/s3_settings.py",  # likewise
    "storage/single_file.py",
}
PROCESS_STATE = {"storage/process.py", "ext/remote/process.py"}  # what of storage a process has once
PURE = {
    "geometry/blocks.py",
    "geometry/box.py",
    "geometry/ranges.py",
    "geometry/shards.py",
    "transfer/plan.py",
    "planning/doctor/findings.py",
    "planning/cadence.py",
    "formats/manifest.py",
    "formats/names.py",
    "formats/record.py",
    "formats/safetensors/header.py",
    "ext/staging/inventory.py",
    "transfer/demand.py",
    "transfer/messages.py",
    "transfer/rounds.py",
    "transfer/routed_plan.py",
    "planning/cluster.py",
    "planning/simulate.py",
    "planning/parameters.py",
    "training/retention.py",
    "saving/layout.py",
    "saving/merge.py",
    "saving/messages.py",
    "saving/shard_map.py",
    "saving/split.py",
    "planning/sizing.py",
    "ext/memory/groups.py",
    "ext/memory/manifest.py",
    "base/units.py",
    "planning/units.py",
}

ENVIRONMENT_NAMES = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
# What takes a path, or reads and writes at an offset; what else there is needs a descriptor from these.
OS_FILE_NAMES = (
    "access chmod link listdir lstat makedirs mkdir mkfifo open pread preadv pwrite pwritev readlink remove "
    "removedirs rename renames replace rmdir scandir stat statvfs symlink truncate unlink utime walk "
    "path.exists path.getmtime path.getsize path.isdir path.isfile path.islink path.lexists path.realpath "
    "path.samefile"
).split()
FILE_NAMES = {f"os.{name}" for name in OS_FILE_NAMES} | set(
    "builtins.open glob io.FileIO io.open pathlib.Path shutil tempfile".split()
)
IMPURE_IMPORTS = (
    "asyncio concurrent datetime fsspec io logging multiprocessing os pathlib random safetensors secrets "
    "select shutil signal socket subprocess tempfile threading time torch urllib uuid"
).split()


class _Names(ast.NodeVisitor):
    """Collects every dotted name that a module uses, with imports and their aliases resolved."""

    def __init__(self, tree: ast.Module) -> None:
        self.aliases: dict[str, str] = {}
        self.imported: set[str] = set()
        self.used: set[str] = set()
        # The builtin, unless the module has an `open` of its own.
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if "open" not in own:
            self.aliases["open"] = "builtins.open"
        self.visit(tree)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self.imported.add(name.name)
            top = name.name.partition(".")[0]
            self.aliases[name.asname or top] = name.name if name.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            full = f"{node.module}.{name.name}"
            self.imported.add(full)
            self.aliases[name.asname or name.name] = full

    def visit_Name(self, node: ast.Name) -> None:
        self.used.add(self.aliases.get(node.id, ""))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = ast.unparse(node)
        head, _, rest = dotted.partition(".")
        if head in self.aliases:
            self.used.add(f"{self.aliases[head]}.{rest}")
        self.generic_visit(node)


def _attributes(tree: ast.ClassDef) -> set[str]:
    """Returns what the methods of a class set on ``self``."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _breaches(module: str, source: str) -> Iterator[str]:
    tree = ast.parse(source)
    names = _Names(tree)
    everything = names.imported | names.used

    def named(*wanted: str) -> set[str]:
        return {name for name in everything for want in wanted if f"{name}.".startswith(f"{want}.")}

    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if len(found := _attributes(owner)) > MAX_ATTRIBUTES:
            yield f"{module}: {owner.name} has {sorted(found)}: group them (at most {MAX_ATTRIBUTES})"
    if module not in DISTRIBUTED and (found := named("torch.distributed")):
        yield f"{module} uses {sorted(found)}: only {sorted(DISTRIBUTED)} may"
    if module not in ENVIRONMENT and (found := named(*ENVIRONMENT_NAMES)):
        yield f"{module} reads {sorted(found)}: only {sorted(ENVIRONMENT)} may, pass an option instead"
    if module not in FILES and (found := named(*FILE_NAMES)):
        yield f"{module} touches files with {sorted(found)}: only {sorted(FILES)} may"
    is_storage = module.startswith(("storage/", "ext/remote/")) and module not in PROCESS_STATE
    if is_storage and (found := named("functools.cache", "functools.lru_cache")):
        yield f"{module} keeps something for the process with {sorted(found)}: see PROCESS_STATE"
    if module in PURE and (found := named(*IMPURE_IMPORTS)):
        yield f"{module} is pure: no {sorted(found)}"


THIRTEEN = ", ".join(f"self.a{number}" for number in range(13))


@pytest.mark.parametrize("module", MODULES)
def test_the_module_keeps_the_rules(module: str) -> None:
    assert list(_breaches(module, (PACKAGE / module).read_text())) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("api.py", "import torch.distributed as dist"),
        ("api.py", "from torch import distributed"),
        ("api.py", "from torch.distributed import barrier"),
        ("api.py", "import torch\ntorch.distributed.barrier()"),
        ("api.py", "import os\nos.environ['A']"),
        ("api.py", "import os as system\nsystem.getenv('A')"),
        ("api.py", "from os import environ"),
        ("transfer/read.py", "open('a')"),
        ("transfer/read.py", "import os\nos.pread(3, 1, 0)"),
        ("transfer/read.py", "from os import preadv"),
        ("transfer/read.py", "import os.path\nos.path.exists('a')"),
        ("ext/load_verify.py", "from pathlib import Path"),
        ("ext/load_verify.py", "import shutil"),
        ("transfer/plan.py", "import time"),
        ("formats/manifest.py", "from torch import Tensor"),
        ("storage/local.py", "from functools import lru_cache"),
        ("storage/local.py", "import functools\n@functools.cache\ndef a(): ..."),
        (
            "base/memory.py",
            f"class A:\n def b(self):\n  {', '.join(f'self.a{n}' for n in range(13))} = range(13)",
        ),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert len(list(_breaches(module, source))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("comm/group.py", "import os\nimport torch.distributed\nos.environ['A']"),
        ("storage/local.py", "import os\nos.preadv(3, [], 0)"),
        ("storage/local.py", "from functools import cached_property, partial"),
        ("storage/process.py", "from functools import cache"),
        ("api.py", "import os\nimport torch\nos.fspath('a')\nos.path.join('a', 'b')\ntorch.empty(1)"),
        ("api.py", "def open(path): ...\nopen('a')"),
        ("ext/load_verify.py", "import fastload\nfastload.open('a')"),
        (
            "base/memory.py",
            f"class A:\n def b(self):\n  return [{', '.join(f'self.a{n}' for n in range(13))}]",
        ),
        ("api.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert list(_breaches(module, source)) == []
