"""torch.distributed.checkpoint: a storage that reads once across replicas, and writes plain safetensors.

Existing code changes one argument::

    dcp.save(state, storage_writer=Writer("/checkpoints/step_100"))
    dcp.load(state, storage_reader=Reader("/checkpoints/step_100"))

Both are collective, in addition to dcp's own collectives. If you give dcp a ``process_group=`` or
``no_dist=True``, give them the same: dcp does not pass it on to its storages.
"""

from fastload.integrations.dcp.reader import Reader
from fastload.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
