"""The process that programs are forked from: it has imported torch and what most of them need.

Each connection is a program that fork_client.py stands for: a request comes, with descriptors; back go the
pid and, at the end, the wait status. The program is killed, with all that it started, when the other end
closes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import marshal
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests.e2e.huge_pages import collapse_memory

# What the first step of an optimizer imports, for 1.5 s, is among them.
_PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "fastload.cli",
    "fastload.training.manager",
    "boto3",
)
_PR_SET_PDEATHSIG = 1
_FIRST_OWN, _MOST_DESCRIPTORS = 3, 1 << 16  # after the standard ones
_libc = ctypes.CDLL(None, use_errno=True)


def _name_of_caller(depth: int = 2) -> str:
    """Torch's own looks for the sources of the whole stack among all modules, at each step of a rendezvous.

    Here are so many that it takes 0.15 s of CPU time each, in which a launcher cannot say that it lives.
    """
    return sys._getframe(depth).f_code.co_name


def serve(path: str) -> None:
    """Listens there; ends when the standard input does."""
    gc.disable()  # until all is imported, which stays
    for module in _PRELOADED:
        if importlib.util.find_spec(module.partition(".")[0]):  # a machine may lack optional ones
            importlib.import_module(module)
    dynamic_rendezvous.get_method_name = _name_of_caller
    torch._dynamo.trace_rules.clear_lru_cache()  # as each process group does, which would copy all its pages
    gc.collect()
    gc.freeze()  # what looks for garbage leaves what is here alone, and so needs no copies of its pages
    gc.enable()
    collapse_memory()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    programs: dict[socket.socket, int] = {}
    with selectors.DefaultSelector() as selector:
        for source in (0, listener, wake_read):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if 0 in ready:
                return
            if wake_read in ready:
                os.read(wake_read, 4096)
                for connection, pid in list(programs.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        _kill(pid)  # what it started and left behind
                        del programs[connection]
                        selector.unregister(connection)
                        with contextlib.suppress(OSError):
                            connection.sendall(b"%d\n" % status)
                        connection.close()
            if listener in ready:
                connection, _ = listener.accept()
                with contextlib.suppress(EOFError):
                    programs[connection] = _fork(connection, [selector, listener, *programs])
                    selector.register(connection, selectors.EVENT_READ)
            for connection in set(ready) & programs.keys():
                _kill(programs[connection])


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _fork(connection: socket.socket, others: list[Any]) -> int:
    header, descriptors, _, _ = socket.recv_fds(connection, 8, 6)
    with connection.makefile("rb") as reader:
        request = marshal.loads(reader.read(int.from_bytes(header, "little")) or marshal.dumps(None))
    if not request:
        raise EOFError
    assert len(os.listdir("/proc/self/task")) == 1, "the server has a second thread: forks are not safe"
    pid = os.fork()
    if not pid:
        for each in (connection, *others):  # the objects: their end would close what has their numbers
            each.close()
        _be_program(request, descriptors)
    os.setpgid(pid, pid)
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # who asked for it was killed meanwhile, and so it is next
        connection.sendall(b"%d\n" % pid)
    return pid


def _be_program(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    code = 1
    try:
        _settle(request, descriptors)
        _run(request["words"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _settle(request: dict[str, Any], descriptors: list[int]) -> None:
    """Makes the fork look like the process that the client is."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in request["ignored"]:
        signal.signal(signum, signal.SIG_IGN)
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, namespace in zip(("net", "uts", "mnt"), descriptors[3:], strict=True):
        is_own = os.path.samestat(os.fstat(namespace), os.stat(f"/proc/self/ns/{name}"))
        if not is_own and _libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), f"setns: {name}")
    for number in range(3):
        os.dup2(descriptors[number], number)
    os.closerange(_FIRST_OWN, _MOST_DESCRIPTORS)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=request["unbuffered"], write_through=request["unbuffered"])  # type: ignore[union-attr]
    os.nice(request["nice"] - os.nice(0))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # Which torch has looked at before the fork.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def _run(words: list[str]) -> None:
    """Runs ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...`` as python does."""
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, rest = (words[0], words[1:]) if words[0] in ("-m", "-c") else ("", words)
    sys.path[:0] = [os.path.dirname(os.path.abspath(rest[0])) if not kind else os.getcwd(), *added]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif kind:
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
    os._exit(0)  # torch would take half a second to free what the end of a process frees
