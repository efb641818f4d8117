"""Optional features. Each imports the core; none imports another one, and the core imports none."""

from __future__ import annotations

from collections.abc import Mapping

EXTENSIONS: Mapping[str, Mapping[str, str]] = {
    "codecs": {  # kinds of values
        "subclass": "fastload.ext.subclasses:codec",
    },
    "commands": {
        "cadence": "fastload.planning.commands.cadence:cadence",
        "convert": "fastload.ext.formats.convert:convert",
        "doctor": "fastload.planning.commands.doctor:doctor",
        "flush": "fastload.ext.memory.command:flush",
        "inspect": "fastload.ext.listings:inspect",
        "load": "fastload.ext.load_verify:load",
        "ls": "fastload.ext.listings:ls",
        "plan": "fastload.planning.commands.plan:plan",
        "prune": "fastload.ext.listings:prune",
        "seal": "fastload.ext.checksums.command:seal",
        "serve": "fastload.ext.serve.command:serve",
        "size": "fastload.planning.commands.size:size",
        "stage": "fastload.ext.staging.command:stage",
        "timeline": "fastload.ext.traces.timeline:timeline",
        "verify": "fastload.ext.load_verify:verify",
    },
    "digests": {  # of replicas on accelerators, to compare them
        "devices": "fastload.ext.device_digests:PendingDigests",
    },
    "formats": {
        "deepspeed": "fastload.ext.formats.deepspeed",
        "torch_checkpointing": "fastload.ext.formats.torch_checkpointing",
    },
    "intervals": {  # what `every=` of a CheckpointManager names
        "auto": "fastload.planning.adaptive:AdaptiveController",
    },
    "layers": {
        "delta": "fastload.ext.deltas.layer:layer",
        "dequantize": "fastload.ext.quantized.layer:layer",
        "seal": "fastload.ext.checksums.seal:layer",
    },
    "listings": {  # of HTTP servers: directories, in their answer to their URL
        "serve": "fastload.ext.serve.listing:parse_listing",
    },
    "ls": {  # options of that command
        "memory": "fastload.ext.memory.command:ls",
    },
    "logs": {
        "events": "fastload.ext.reports.log:log_event",
    },
    "observers": {
        "trace": "fastload.ext.traces.tracing",
    },
    "plan_transforms": {
        "delta": "fastload.ext.deltas.save:save_changes",
    },
    "prune": {  # likewise
        "memory": "fastload.ext.memory.command:prune",
    },
    "snapshots": {  # other ones than those that training waits for
        "overlap": "fastload.ext.overlap:OverlappedSnapshot",
    },
    "sources": {  # of the bytes of a checkpoint, next to its storage
        "peers": "fastload.ext.serve.peers:peers",
    },
    "stage": {  # followers of the copy that it makes, with options of theirs
        "serve": "fastload.ext.serve.command:CopyServing",
    },
    "storages": {  # by the schemes of their URLs
        "hf": "fastload.ext.remote.open_hub:open_hub",
    },
    "reports": {
        "table": "fastload.ext.reports.tables:table",
    },
    "switches": {  # called once with the environment variable FASTLOAD_NAME, if it is not empty
        "metrics": "fastload.ext.metrics:switch_on",
    },
    "surveys": {  # of tiers, from outside of a training
        "memory": "fastload.ext.memory.recovery:survey_run",
    },
    "tiers": {  # next to storage, for a CheckpointManager
        "memory": "fastload.ext.memory.tier:open_tier",
    },
}
"""What they bring, by kind and name. Other packages use entry points of the groups ``fastload.KIND``."""
