"""Replaces the storages of torch's DCP, or the functions of safetensors, in every process of a test run.

Python imports this module at its start, since its directory is in PYTHONPATH: also in ranks that tests spawn.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def replace_dcp() -> None:
    """Has fastload's Reader and Writer in place of DCP's, with the arguments of these."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

    import fastload.integrations.dcp as own

    class Writer(own.Writer):
        def __init__(self, path: Any = None, *_: Any, overwrite: bool = True, **__: Any) -> None:
            super().__init__(path, options=None if overwrite else fastload_options(overwrite=False))
            self.path = path

    class Reader(own.Reader):
        def __init__(self, path: Any = None, *_: Any, **__: Any) -> None:
            super().__init__(path)
            self.path = path

    def fastload_options(**given: Any) -> Any:
        import fastload

        return fastload.SaveOptions(**given)

    def told(module: Any, name: str, storage_name: str) -> None:
        """Has the storage told which ranks dcp includes, as its users have to."""
        call = getattr(module, name)

        def wrapped(state: Any, storage: Any = None, *arguments: Any, **keywords: Any) -> Any:
            storage = keywords.pop(storage_name, storage)
            if isinstance(storage, own.Writer | own.Reader):
                storage._process_group = keywords.get("process_group", arguments[0] if arguments else None)
                storage._no_dist = bool(keywords.get("no_dist", False))
            return call(state, storage, *arguments, **keywords)

        setattr(module, name, wrapped)

    told(state_dict_saver, "_save_state_dict", "storage_writer")
    told(state_dict_loader, "_load_state_dict", "storage_reader")
    from torch.distributed.checkpoint import _storage_utils

    for module in (dcp, filesystem, _storage_utils):
        module.FileSystemWriter = Writer
        module.FileSystemReader = Reader


def replace_safetensors() -> None:
    """Has files written by `fastload.save` and read by `fastload.load`."""
    import tempfile

    import safetensors.torch as theirs

    import fastload

    def save_file(tensors: Any, filename: Any, metadata: Any = None, **_: Any) -> None:
        with tempfile.TemporaryDirectory(dir=Path(filename).absolute().parent) as folder:
            options = fastload.SaveOptions(max_shard_bytes=1 << 50)
            fastload.save(tensors, f"{folder}/new", metadata=metadata, options=options)
            os.replace(f"{folder}/new/model.safetensors", filename)

    def load_file(filename: Any, device: Any = "cpu", **_: Any) -> Any:
        return fastload.load(filename, device=device)

    theirs.save_file, theirs.load_file = save_file, load_file


if os.environ.get("FASTLOAD_REPLACES") == "dcp":
    replace_dcp()
elif os.environ.get("FASTLOAD_REPLACES") == "safetensors":
    replace_safetensors()
