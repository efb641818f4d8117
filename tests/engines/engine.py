"""An engine of vLLM in a process of its own: forked from one that has imported vLLM, which takes long."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["DEADLINE_S", "ENVIRONMENT", "Engine", "apart", "engine"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
DEADLINE_S = 240.0
_PROMPTS = [[5, 6, 7, 8], [300, 9, 12]]


class Engine:
    """An engine in this process, its workers in others if there are several."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def say(self) -> list[Any]:
        """Returns what it says to some prompts: tokens and their log probabilities."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        how = SamplingParams(max_tokens=6, temperature=0, logprobs=1, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in _PROMPTS]
        answers = [answer.outputs[0] for answer in self.llm.generate(prompts, how, use_tqdm=False)]
        return [
            (
                list(answer.token_ids),
                [
                    found[token].logprob
                    for token, found in zip(answer.token_ids, answer.logprobs, strict=True)
                ],
            )
            for answer in answers
        ]

    def refresh(self, path: object, **options: Any) -> str:
        """Replaces its weights; returns the error, or nothing."""
        try:
            self.llm.collective_rpc("refresh_weights", args=(str(path), *([options] if options else [])))
        except Exception as error:
            return str(error)
        return ""


@contextmanager
def engine(model: Path, load_format: str = "fastload", tp: int = 1, **settings: Any) -> Iterator[Engine]:
    """Starts an engine, and ends it."""
    from vllm import LLM

    settings = {
        "worker_extension_cls": "fastload.integrations.vllm_refresh.WorkerExtension",
        "weight_transfer_config": {"backend": "fastload"},
        **settings,
    }
    how = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "disable_log_stats": True}
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "tensor_parallel_size": tp}
    llm = LLM(str(model), load_format=load_format, **how, **sizes, **settings)
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def apart(body: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function run in a process forked from this one; all that it starts ends with it."""

    @functools.wraps(body)
    def run(*args: Any, **named: Any) -> Any:
        os.environ.update(
            ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_WORKER_MULTIPROC_METHOD="fork"
        )
        importlib.import_module("vllm")
        importlib.import_module("vllm.v1.worker.cpu_worker")
        importlib.import_module("transformers")
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.close(ours)
            _fork_workers()
            code = _answer(theirs, functools.partial(body, *args, **named))
            os._exit(code)
        os.close(theirs)
        try:
            good, result = pickle.loads(_read(ours))
        finally:
            os.close(ours)
            for number in (signal.SIGTERM, signal.SIGKILL):
                _end(pid, number)
            os.waitpid(pid, 0)
        if not good:
            raise AssertionError(f"in another process:\n{result}")
        return result

    return run


def _fork_workers() -> None:
    """Has vLLM fork its workers, which on CPUs it would spawn: each of them would import it anew."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        original(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def _answer(pipe: int, body: Callable[[], Any]) -> int:
    try:
        answer = pickle.dumps((True, body()))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    with os.fdopen(pipe, "wb") as out:
        out.write(answer)
    return 0


def _read(pipe: int) -> bytes:
    deadline, parts = time.monotonic() + DEADLINE_S, []
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        parts.append(part)
    else:
        parts = [pickle.dumps((False, f"no answer within {DEADLINE_S} s"))]
    return b"".join(parts) or pickle.dumps((False, "it ended without an answer"))


def _end(session: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(session, number)
