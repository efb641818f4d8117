"""What integrations share: checks of a library and its models, their state dicts, saves in the background."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from fastload import (
    LoadOptions,
    OptionError,
    SaveHandle,
    SaveOptions,
    SaveReport,
    async_save,
    save,
    world,
)
from fastload.comm.group import Meeting
from fastload.comm.steps import Step
from fastload.formats.encoder import encode_state
from fastload.formats.names import RECORD_NAME
from fastload.geometry.dtensors import local_of
from fastload.options import chosen_options
from fastload.saving.background import await_end

_log = logging.getLogger(__name__)

_PLAIN = (Tensor, nn.Parameter)


def unknown_version(library: ModuleType, tested: str, reason: object) -> OptionError:
    """Returns the error for a library whose version an integration does not know.

    Args:
        library: What is installed.
        tested: The version that the integration is tested with.
        reason: How the installed one differs.
    """
    version = getattr(library, "__version__", "of no version")
    return OptionError(
        f"fastload does not know {library.__name__} {version}: {reason}; it is tested with {tested}"
    )


def require_signatures(library: ModuleType, tested: str, signatures: Mapping[str, tuple[Any, str]]) -> None:
    """Raises unless the functions that an integration replaces or calls have the expected parameters.

    Args:
        library: What is installed.
        tested: The version that the integration is tested with.
        signatures: Name of a function for messages → its class or module, and its parameters separated by
            blanks.

    Raises:
        OptionError: A function is missing, or has other parameters.
    """
    for name, (owner, parameters) in signatures.items():
        found = getattr(owner, name.rpartition(".")[2], None)
        names = list(inspect.signature(found).parameters) if callable(found) else None
        if names != parameters.split():
            problem = "is not there" if names is None else f"takes ({', '.join(names)})"
            raise unknown_version(library, tested, f"{name} {problem}")


def refuse(what: str, reasons: Mapping[str, bool], advice: str = "") -> None:
    """Raises if any of the reasons holds.

    Args:
        what: What fastload cannot do then, such as ``save a training``.
        reasons: What it would have to do that with → whether it is in use.
        advice: What to do instead.

    Raises:
        OptionError: Some reasons hold; it names them.
    """
    if found := [name for name, is_in_use in reasons.items() if is_in_use]:
        problem = f"fastload cannot {what} with {', '.join(found)}"
        raise OptionError(f"{problem}: {advice}" if advice else problem)


def unsupported_tensors(model: nn.Module) -> str:
    """Names the classes of a model's tensors that cannot be saved, such as quantized weights.

    Returns:
        The names, joined by commas. Lazy tensors do not count: they may become plain ones.
    """
    tensors = (tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor))
    kinds = {type(local_of(tensor)) for tensor in tensors} - {*_PLAIN}
    return ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))


@contextmanager
def step_of_all(
    what: str, *, process_group: Any = None, options: LoadOptions | SaveOptions | None = None
) -> Iterator[Step]:
    """The block of a step that all ranks take in a call of its own; see `fastload.comm.steps.Step`.

        with step_of_all("looking at /a") as step:
            step.answer(os.path.isfile("/a") if world.get_rank() == 0 else None)
        is_file = step.answers[0]

    Args:
        what: Name of the step, for messages.
        process_group: As for `fastload.load`.
        options: Of the caller, who has not checked them; they give the timeout. None for the defaults.

    Raises:
        FastloadError: The block failed on a rank, or a rank has options of another class.
    """
    kind: Any = SaveOptions if isinstance(options, SaveOptions) else LoadOptions
    with Meeting(process_group, what) as meeting:
        meeting.choose(options, kind)
    with meeting.world.ending(), meeting.world.step() as step:
        yield step


def require_storable_states(optimizers: Iterable[Any]) -> None:
    """Raises if the states of optimizers cannot be saved.

    Optimizers of torchao are asked before the first step. Others are checked right after it, when they have
    made their states.

    Raises:
        OptionError: Some cannot be saved; names their classes.
    """
    for optimizer in optimizers:
        states = list(getattr(optimizer, "state", {}).values())
        for each in states or _future_states(optimizer):
            _require_storable(optimizer, each)
        if not states and isinstance(optimizer, torch.optim.Optimizer):
            _check_after_first_step(optimizer)


def _check_after_first_step(optimizer: torch.optim.Optimizer) -> None:
    is_checked = False  # a hook cannot be removed while torch calls it and the hooks after it

    def check(stepped: Any, *_: Any) -> None:
        nonlocal is_checked
        if stepped.state and not is_checked:
            is_checked = True
            for each in stepped.state.values():
                _require_storable(stepped, each)

    optimizer.register_step_post_hook(check)


def _require_storable(optimizer: Any, state: Any) -> None:
    try:
        encode_state(state)
    except OptionError as error:
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise OptionError(f"fastload cannot save a training with the optimizer {name}: {error}") from None


def _future_states(optimizer: Any) -> Iterator[Tensor]:
    """Yields what the first step of an optimizer of torchao would make, for parameters of each size."""
    new_buffer = getattr(optimizer, "_new_buffer", None)
    if callable(new_buffer) and list(inspect.signature(new_buffer).parameters) == ["p", "signed"]:
        sizes = {
            (type(parameter), local_of(parameter).numel()): parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for parameter in sizes.values():
            with torch.no_grad():
                yield new_buffer(parameter, True)


def lone_group() -> Any:
    """Returns a group of this rank alone, without the other ranks; None if it is alone anyway."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return _lone_group(dist.group.WORLD)


@cache
def _lone_group(default_group: Any) -> Any:
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def is_fastload_checkpoint(folder: str) -> bool:
    """Whether fastload saved the checkpoint in a directory, as rank 0 sees it. A call of all ranks."""
    with step_of_all(f"looking at {folder}") as step:
        step.answer(world.get_rank() == 0 and os.path.isfile(os.path.join(folder, RECORD_NAME)))
    return bool(step.answers[0])


def live_state(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model, without the names of wrappers; its tensors are the model's own."""
    return get_model_state_dict(model)


def state_to_save(model: nn.Module, process_group: Any = None) -> dict[str, Any]:
    """Returns the state dict of a model, with rank 0's buffers, such as running statistics.

    Buffers may differ between ranks, and frameworks save those of rank 0.

    Args:
        model: The model.
        process_group: As for `fastload.save`; all of its ranks call this.
    """
    with step_of_all("taking the state of the model", process_group=process_group):
        state = live_state(model)
    names = {_bare(name) for name, _ in model.named_buffers()}
    buffers = [name for name in state if _bare(name) in names and type(state[name]) is Tensor]
    if dist.is_initialized():
        group = process_group.get_group() if isinstance(process_group, DeviceMesh) else process_group
        for device in sorted({state[name].device for name in buffers}, key=str):
            own = {name: state[name] for name in buffers if state[name].device == device}
            state |= _broadcast(own, group)
    return state


def _bare(name: str) -> str:
    return name.removeprefix("module.").replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _broadcast(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Returns copies of tensors of one device, with the values of the first rank of a group."""
    plain = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors.values()]
    packed = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in plain])
    source = 0 if group is None else dist.get_process_group_ranks(group)[0]
    dist.broadcast(packed, source, group=group)
    parts = packed.split([tensor.nbytes for tensor in tensors.values()])
    return {
        name: part.clone().view(tensor.dtype).view(tensor.shape)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


class BackgroundSave:
    """The saves of a training: at most one in the background, and work that follows once it is durable.

    Args:
        options: How to save; None for the defaults. An existing checkpoint is replaced in any case.

    Attributes:
        path: Destination of the save that is under way; else empty.
        problems: Why work that was to follow has failed on this rank.
    """

    def __init__(self, options: SaveOptions | None) -> None:
        self.path = ""
        self.problems: list[str] = []
        self._options = replace(chosen_options(options, SaveOptions), overwrite=True)
        self._handle: SaveHandle | None = None
        self._thread: ThreadPoolExecutor | None = None  # does the work that follows the save under way

    def save(self, state: Any, path: str, *, in_background: bool, **arguments: Any) -> None:
        """Saves a state, once the last save is durable.

        Args:
            state: As for `fastload.save`.
            path: Likewise.
            in_background: Whether to return as soon as each rank has copied its share.
            arguments: Further ones of `fastload.save`.

        Raises:
            FastloadError: As for `fastload.save`; or the last save has failed.
        """
        self.wait()
        if in_background:
            self._handle = async_save(state, path, options=self._options, **arguments)
            self.path = path
        else:
            save(state, path, options=self._options, **arguments)

    def once_durable(self, what: str, work: Callable[[], object]) -> None:
        """Does some work on rank 0 as soon as the save under way is durable; now if there is none.

        The works of a save are done in their order, and none if it fails.

        Args:
            what: Name of the work, for messages.
            work: The work.
        """
        if world.get_rank() == 0:
            if self._handle is None:
                self._do(what, work)
            else:
                self._thread = self._thread or ThreadPoolExecutor(1, "fastload-after-save")
                self._thread.submit(self._follow, self._handle, what, work)

    def wait(self) -> None:
        """Waits until the last save is durable, and what follows it is done.

        Raises:
            FastloadError: It failed.
        """
        handle, self._handle, self.path = self._handle, None, ""
        thread, self._thread = self._thread, None
        try:
            if handle is not None:
                handle.wait()
        finally:
            if thread is not None:
                thread.shutdown()

    def _follow(self, handle: SaveHandle, what: str, work: Callable[[], object]) -> None:
        await_end(handle)
        if handle.report is not None:
            self._do(what, work)

    def _do(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self.problems.append(f"{what} failed: {type(error).__name__}: {error}")
            _log.warning("%s", self.problems[-1])


class SaveFuture(Future[Any]):
    """A save in the background, as libraries wait for it."""

    def __init__(self, handle: SaveHandle) -> None:
        super().__init__()
        self._handle = handle

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._handle.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint exists.

        Raises:
            FastloadError: It failed; on all ranks.
        """
        return self._handle.wait(timeout)
