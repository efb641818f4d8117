"""What the ranks of test_transformers.py do. Not imported by pytest itself: transformers takes seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DistributedConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import is_torchao_available

import fastload
from fastload.geometry.dtensors import local_of
from fastload.integrations import accelerate as accelerate_integration
from fastload.integrations.trainer import TrainerMixin
from fastload.integrations.transformers import from_pretrained
from tests.pages import run_program

SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def llama(*, tied: bool = True) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied, attention_dropout=0.1))


def experts() -> Any:
    sizes = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **sizes))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return {**config, "target_modules": sorted(config["target_modules"])}  # PEFT writes a set


def shares_adapters(rank: int, world: int, tmp_path: Path) -> None:
    """Adapters of PEFT and of fastload come into one base, plain and sharded, and are PEFT's own files."""
    from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file

    from fastload.integrations import peft as integration

    torch.manual_seed(0)
    base, expected = llama(), {}
    for name, has_magnitudes in (("one", False), ("two", True)):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=has_magnitudes)
        made = get_peft_model(llama(), config, adapter_name="default")
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter)
        expected[name] = get_peft_model_state_dict(made)
        if rank == 0:
            made.save_pretrained(tmp_path / "peft" / name)
        dist.barrier()
        integration.save(made, tmp_path / "plain" / name)
    adapted = PeftModel(base, PeftConfig.from_pretrained(tmp_path / "peft" / "one"), adapter_name="one")
    for source, is_sharded in (("peft", False), ("plain", False), ("peft", True)):
        if is_sharded:
            fully_shard(adapted)
        for name, tensors in expected.items():
            if name in adapted.peft_config:
                for tensor in get_peft_model_state_dict(adapted, adapter_name=name).values():
                    local(tensor).detach().zero_()
            reports: list[fastload.LoadReport] = []
            options = fastload.LoadOptions(strategy="allgather", on_report=reports.append)
            integration.load(adapted, tmp_path / source / name, adapter_name=name, options=options)
            assert reports[0].bytes_read == reports[0].bytes_wanted
            found = get_peft_model_state_dict(adapted, adapter_name=name)
            assert found.keys() == tensors.keys()
            for key, tensor in found.items():
                complete = tensor.full_tensor() if is_sharded else tensor
                assert torch.equal(complete, tensors[key]), key
    for name in expected:
        integration.save(adapted, tmp_path / "sharded" / name, adapter_name=name)
        for source in ("plain", "sharded"):
            own, other = tmp_path / source / name, tmp_path / "peft" / name
            assert sorted(path.name for path in own.iterdir()) == [
                "adapter_config.json", "adapter_model.safetensors", "fastload.json"
            ]  # fmt: skip
            assert config_of(own) == config_of(other)
            theirs = load_file(other / "adapter_model.safetensors")
            ours = load_file(own / "adapter_model.safetensors")
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    if rank == 0:
        read = get_peft_model_state_dict(PeftModel.from_pretrained(llama(), tmp_path / "sharded" / "two"))
        assert all(torch.equal(read[key], tensor) for key, tensor in expected["two"].items())
    with pytest.raises(fastload.OptionError, match=r"no adapter 'three': it has 'one', 'two'"):
        integration.save(adapted, tmp_path / "three", adapter_name="three")
    with pytest.raises(fastload.MismatchError, match="lora_magnitude"):
        integration.load(adapted, tmp_path / "peft" / "one", adapter_name="two")


def loads_what_peft_computes(rank: int, world: int, tmp_path: Path) -> None:
    """Adapters whose files have other tensors than the model come into the model, too."""
    import peft

    from fastload.integrations import peft as integration

    tokens = torch.arange(8).view(1, 8)
    targets = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    prompts = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
    vectors = {"r": 4, "num_vectors": 8, "vector_length": 4, "save_only_topk_weights": True}
    configs = {
        "prompts": peft.PromptTuningConfig(**prompts),
        "prefixes": peft.PrefixTuningConfig(**prompts),
        "ranks": peft.AdaLoraConfig(init_r=6, target_r=3, tinit=1, tfinal=2, total_step=8, **targets),
        "vectors": peft.VBLoRAConfig(**vectors, **targets),
    }
    for name, config in configs.items():
        torch.manual_seed(1)
        made = peft.get_peft_model(llama(), config)
        for parameter in filter(lambda each: each.requires_grad, made.parameters()):
            torch.nn.init.normal_(parameter)
        if name == "ranks":
            optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
            for step in range(8):
                made(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                made.base_model.update_and_allocate(step)
                optimizer.zero_grad()
            assert not all(map(all, config.rank_pattern.values()))
        integration.save(made, tmp_path / name)
        torch.manual_seed(1)
        by_peft = peft.PeftModel.from_pretrained(llama(), tmp_path / name)
        torch.manual_seed(1)
        config = peft.PeftConfig.from_pretrained(tmp_path / name)
        config.inference_mode = False  # then PEFT copies the embedding of prompts
        own = peft.PeftModelForCausalLM(llama(), config)
        integration.load(own, tmp_path / name)
        assert torch.equal(own.eval()(tokens).logits, by_peft.eval()(tokens).logits), name


def refuses_adapters(rank: int, world: int, tmp_path: Path) -> None:
    """What is wrong with an adapter is an error on all ranks, and leaves nothing behind."""
    from peft import LoraConfig, get_peft_model

    from fastload.integrations import peft as integration

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    integration.save(model, tmp_path / "good")
    names = list(model.state_dict())
    text = json.loads((tmp_path / "good" / "adapter_config.json").read_text())
    bad = "{", json.dumps({**text, "r": 8}), json.dumps({**text, "peft_type": "X"})
    for number, config in enumerate(bad):
        folder = tmp_path / f"bad-{number}"
        if rank == 0:
            shutil.copytree(tmp_path / "good", folder)
            (folder / "adapter_config.json").write_text(config)
        dist.barrier()
        with pytest.raises(fastload.FastloadError, match=str(folder)):
            integration.load(model, folder, adapter_name="other")
        assert list(model.peft_config) == ["default"]
        assert list(model.state_dict()) == names
    integration.load(model, tmp_path / "good", adapter_name="other")
    if rank == 0:
        (tmp_path / "file").write_text("mine")
    dist.barrier()
    with pytest.raises(fastload.OptionError, match="file is a file"):
        integration.save(model, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(fastload.OptionError, match=r"s3://bucket/adapter: .* give a path"):
        integration.save(model, "s3://bucket/adapter")
    with pytest.raises(fastload.PeerError, match=r"rank 1 on .*OptionError: the model has no adapter"):
        integration.save(model, tmp_path / "new", adapter_name="default" if rank == 0 else "of-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad-0", "bad-1", "bad-2", "file", "good"]


def saves_adapters_of_a_group(rank: int, world: int, tmp_path: Path) -> None:
    """Some ranks save an adapter with buffers, which are those of the first of them; then through a link."""
    from peft import LoraConfig, get_peft_model

    from fastload.integrations import peft as integration

    group, mesh = dist.new_group([1, 2]), dist.init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    config = LoraConfig(target_modules=["0"], modules_to_save=["1"])
    adapted = get_peft_model(model, config)
    for name, tensor in adapted.state_dict().items():
        tensor.fill_(rank if "running_mean" in name else 1)
    if rank > 0:
        integration.save(adapted, tmp_path / "some", process_group=group)
    integration.save(adapted, tmp_path / "all", process_group=mesh)
    for folder, value in (("some", 1.0), ("all", 0.0)):
        found = fastload.load(tmp_path / folder)
        assert found["base_model.model.1.running_mean"].tolist() == [value] * 4
    if rank == 0:
        (tmp_path / "link").symlink_to("some")
    dist.barrier()
    integration.save(adapted, tmp_path / "link")  # through the link, as PEFT does
    assert fastload.load(tmp_path / "some")["base_model.model.1.running_mean"].tolist() == [0.0] * 4
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "link", "some"]


def assert_same_models(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    own, others = one.state_dict(), other.state_dict()
    assert list(own) == list(others)
    for name, tensor in own.items():
        assert getattr(tensor, "placements", None) == getattr(others[name], "placements", None), name
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(local(tensor), local(others[name])), name
    assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in other.parameters()]
    tied = [len({id(p) for p in model.parameters(recurse=True)}) for model in (one, other)]
    assert tied[0] == tied[1]
    assert one.config.to_dict() == other.config.to_dict()


def loads_as_transformers_does(rank: int, world: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if rank == 0:
        llama().save_pretrained(tmp_path / "tied")
        experts().save_pretrained(tmp_path / "experts", max_shard_size="40KB")  # each expert by itself
        experts().save_pretrained(tmp_path / "merged", save_original_format=False)
        (tmp_path / "bin").mkdir()
        whole = llama(tied=False)
        whole.config.save_pretrained(tmp_path / "bin")
        torch.save(whole.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
        assert len(list((tmp_path / "experts").glob("*.safetensors"))) > 2
    dist.barrier()
    reports: list[fastload.LoadReport] = []
    options = fastload.LoadOptions(on_report=reports.append, timeout_s=20, strategy="allgather")
    ways: list[tuple[str, dict[str, Any]]] = [
        *((name, {}) for name in ("tied", "experts", "merged", "bin")),
        ("experts", {"dtype": torch.bfloat16}),
    ]
    if world == 2:
        ways += [
            (name, {"distributed_config": DistributedConfig(**config)})
            for name in ("tied", "experts")
            for config in ({"tp_size": 2}, {"fsdp_size": 2})
        ]
    else:
        ways.append(("experts", {"distributed_config": DistributedConfig(tp_size=2, fsdp_size=2)}))
    for name, keywords in ways:
        given = {**keywords, "output_loading_info": True}
        expected, expected_info = AutoModelForCausalLM.from_pretrained(tmp_path / name, **given)
        reports.clear()
        model, info = from_pretrained(AutoModelForCausalLM, tmp_path / name, options=options, **given)
        assert_same_models(model, expected)
        assert info == expected_info
        assert len(reports) == 1, (name, keywords, [report.num_tensors for report in reports])
        (report,) = reports
        heads = sum(each.bytes_read for each in report.ranks) - report.bytes_wanted
        # A file of torch.save has a head before each tensor, which is checked.
        assert 0 < heads <= 512 * report.num_tensors if name == "bin" else heads == 0
        assert max(each.bytes_read for each in report.ranks) < report.bytes_wanted

    if world == 2:
        refuses(rank, tmp_path, options)


def refuses(rank: int, tmp_path: Path, options: fastload.LoadOptions) -> None:
    """What cannot be loaded is one error on all ranks, and so is what only one of them cannot load."""
    load: Callable[..., Any] = from_pretrained
    with pytest.raises(fastload.PlanMismatch, match=r"(?s)rank 0 is .*tied.*, rank 1 is .*gone"):
        load(AutoModelForCausalLM, tmp_path / ("tied" if rank == 0 else "gone"), options=options)
    with pytest.raises(fastload.OptionError, match=r"quantization_config"):
        load(AutoModelForCausalLM, tmp_path / "tied", options=options, quantization_config={"a": 1})
    with pytest.raises(fastload.OptionError, match=r"gguf_file"):
        load(AutoModelForCausalLM, tmp_path / "tied", options=options, gguf_file="a.gguf")
    keywords: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path / "offload")}
    with pytest.raises(fastload.OptionError, match=r"to stay on disk"):
        load(AutoModelForCausalLM, tmp_path / "tied", options=options, **keywords)
    with pytest.raises(fastload.OptionError, match=r"fastload\.stage"):
        load(AutoModelForCausalLM, "s3://bucket/llama", options=options)
    # As if one rank ran out of memory where the model is made.
    made = LlamaForCausalLM.__init__
    if rank == 1:
        LlamaForCausalLM.__init__ = None
    try:
        with pytest.raises(fastload.PeerError, match=r"(?s)failed on 1 of 2 ranks.*rank 1 .*TypeError"):
            load(AutoModelForCausalLM, tmp_path / "tied", options=options)
    finally:
        LlamaForCausalLM.__init__ = made


@contextmanager
def fsdp_without_gpus(version: int = 2) -> Iterator[None]:
    """accelerate shards on accelerators only: here it is told that there are some."""
    own = AcceleratorState.__init__

    def init(state: Any, *arguments: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        own(state, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            fsdp_plugin.fsdp_version = version

    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = own


class OurTrainer(TrainerMixin, Trainer):
    pass


class WithDeepSpeed(OurTrainer):
    """Takes itself for one, as a Trainer does that finds a plugin of DeepSpeed."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_deepspeed_enabled = True


def quantized(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of several, as those of torchao are, by a class that torch has itself."""
    return TwoTensor(weight.detach(), weight.detach())


class Killer(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def arguments_of(folder: Path, *, fsdp: int, **more: Any) -> TrainingArguments:
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "save_steps": 2,
        "eval_steps": 2,
        "eval_strategy": "steps",
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        **({"fsdp": True, "fsdp_config": config} if fsdp else {}),
    }
    return TrainingArguments(**{**given, **more})


def adapted() -> Any:
    """A model with two adapters, of which one is trained."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(
        llama(tied=False), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    made.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    return made


def trainer_of(
    folder: Path,
    *,
    fsdp: int = 0,
    kill_at: int = -1,
    has_adapters: bool = False,
    kind: type[Trainer] = OurTrainer,
    model: Any = None,
    **more: Any,
) -> Trainer:
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 128, (8,), generator=numbers) for _ in range(64)]
    data: Any = [{"input_ids": each, "labels": each} for each in tokens]
    with fsdp_without_gpus(fsdp):
        return kind(
            model=model or (adapted() if has_adapters else llama(tied=not fsdp)),
            args=arguments_of(folder, fsdp=fsdp, **more),
            train_dataset=data,
            eval_dataset=data[:8],
            callbacks=[Killer(kill_at)],
        )


def trains(
    rank: int, world: int, folder: Path, fsdp: int, kill_at: int, resumes: bool, has_adapters: bool
) -> dict[str, Any]:
    """Trains to the end, or to where it is killed; returns weights of the best model, and what is left."""
    if resumes and fsdp:
        for path in folder.glob("checkpoint-*"):
            name_random_states_as_before(path / "training_state")
    trainer = trainer_of(folder, fsdp=fsdp, kill_at=kill_at, has_adapters=has_adapters)
    began_at: list[int] = []

    class Beginning(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            began_at.append(state.global_step)

    trainer.add_callback(Beginning())
    trainer.train(resume_from_checkpoint=resumes)
    assert trainer.state.global_step == 6
    weights = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
    best = Path(trainer.state.best_model_checkpoint)
    if rank == 0 and has_adapters:
        assert_read_by_peft(best, weights)
    elif rank == 0 and fsdp:
        # It is a directory of transformers, whoever saved it.
        found = AutoModelForCausalLM.from_pretrained(best).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert (best / "training_args.bin").exists()
    return {
        "weights": {name: tensor.tolist() for name, tensor in weights.items()} if rank == 0 else {},
        "best": best.name,
        "kept": sorted(path.name for path in folder.iterdir()),
        "began_at": began_at[0],
    }


def assert_read_by_peft(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """The directory is one of PEFT, whoever saved it."""
    from peft import PeftModel

    found = PeftModel.from_pretrained(llama(tied=False), path)
    found.load_adapter(path / "other", "other")
    names = [name for name in weights if "lora_" in name]
    assert len(names) == 8
    assert all(torch.equal(found.state_dict()[name], weights[name]) for name in names)


def name_random_states_as_before(path: Path) -> None:
    """Changes a checkpoint to what TrainerMixin saved before it used `fastload.random_state`."""
    state = fastload.load(path)
    states = state["random_states"]
    name, keys, *rest = states["numpy"]
    before = {"python": states["python"], "numpy": (name, np.array(keys, np.uint32), *rest)}
    state["random_states"] = fastload.PerRank({**before, "cpu": states["torch"]})
    fastload.save(state, path, options=fastload.SaveOptions(overwrite=True))


class Packed(torch.optim.SGD):
    """Makes states of several tensors in its first step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["a"] = quantized(parameter)
        return loss


class PackedLikeTorchao(Packed):
    """Likewise, with the method by which the optimizers of torchao make theirs."""

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> Any:
        return quantized(p)


def refuses_optimizers(rank: int, world: int, tmp_path: Path) -> None:
    for kind, num_steps in ((Packed, 1), (PackedLikeTorchao, 0)):
        model = llama()
        trainer = trainer_of(tmp_path, model=model, save_steps=100)
        trainer.optimizer = kind(model.parameters(), lr=0.1)
        with pytest.raises(
            fastload.OptionError, match=rf"with the optimizer .*\.{kind.__name__}: .*TwoTensor"
        ):
            trainer.train()
        assert trainer.state.global_step == 0
        assert len(trainer.optimizer.state) == num_steps * len(list(model.parameters()))
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        optimizer = accelerator.prepare(kind(model.parameters(), lr=0.1))
        if num_steps:
            optimizer.optimizer.step()
        with pytest.raises(
            fastload.OptionError, match=rf"with the optimizer .*\.{kind.__name__}: .*TwoTensor"
        ):
            accelerate_integration.attach(accelerator)
        AcceleratorState._reset_state(reset_partial_state=True)
    assert not any(tmp_path.iterdir())


def trains_with_torchao(rank: int, world: int, tmp_path: Path, fsdp: int) -> None:
    """Stops, resumes, and ends as without the stop, bit for bit."""
    torch.compiler.set_stance("force_eager")  # its steps are compiled
    is_torchao_available.cache_clear()  # of a process that has looked for it before
    ends = []
    for folder, stops in (("straight", [6]), ("stopped", [4, 6])):
        for stop in stops:
            config = LlamaConfig(**{**SIZES, "hidden_size": 64}, **HEADS, tie_word_embeddings=not fsdp)
            torch.manual_seed(0)
            trainer = trainer_of(
                tmp_path / folder,
                fsdp=fsdp,
                model=LlamaForCausalLM(config),
                optim="adamw_torch_8bit",
                max_steps=stop,
                lr_scheduler_type="constant",
            )
            trainer.train(resume_from_checkpoint=stop != stops[0])
            assert trainer.state.global_step == stop
            AcceleratorState._reset_state(reset_partial_state=True)
        ends.append(get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True)))
    kinds = {type(local_of(state["exp_avg"])).__name__ for state in trainer.optimizer.state.values()}
    assert kinds == {"Tensor", "OptimState8bit"}
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def refuses_trainings(rank: int, world: int, tmp_path: Path) -> None:
    with pytest.raises(fastload.OptionError, match=r"FSDP 1 \(set fsdp_version: 2\)"):
        trainer_of(tmp_path, fsdp=1)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(fastload.OptionError, match=r"save_on_each_node"):
        trainer_of(tmp_path, save_on_each_node=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    if importlib.util.find_spec("peft"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        adapted = get_peft_model(llama(tied=False), config)
        adapted.add_adapter("replaced", config)
        with pytest.raises(fastload.OptionError, match=r"'training_state' and 'replaced' are taken"):
            OurTrainer(model=adapted, args=arguments_of(tmp_path, fsdp=0), eval_dataset=[])  # type: ignore[arg-type]
        AcceleratorState._reset_state(reset_partial_state=True)
    model = llama(tied=True)
    model._hf_peft_config_loaded = True  # as transformers marks it
    with pytest.raises(
        fastload.OptionError, match=r"a training with adapters of PreTrainedModel\.add_adapter"
    ):
        OurTrainer(model=model, args=arguments_of(tmp_path, fsdp=0), eval_dataset=[])  # type: ignore[arg-type]
    AcceleratorState._reset_state(reset_partial_state=True)
    model = llama(tied=True)
    model.lm_head.weight = torch.nn.Parameter(quantized(model.lm_head.weight))
    with pytest.raises(fastload.OptionError, match=r"cannot save a training with weights of .*TwoTensor$"):
        OurTrainer(model=model, args=arguments_of(tmp_path, fsdp=0), eval_dataset=[])  # type: ignore[arg-type]
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(model, evaluation_mode=True)
    with pytest.raises(fastload.OptionError, match=r"an Accelerator with weights of .*TwoTensor$"):
        accelerate_integration.attach(accelerator)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(fastload.OptionError, match=r"cannot save a training with DeepSpeed$"):
        WithDeepSpeed(model=llama(tied=True), args=arguments_of(tmp_path, fsdp=0), eval_dataset=[])  # type: ignore[arg-type]
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        accelerator.state.distributed_type = kind  # which it takes where their libraries are
        with pytest.raises(fastload.OptionError, match=f"an Accelerator with {kind.value}$"):
            accelerate_integration.attach(accelerator)
    AcceleratorState._reset_state(reset_partial_state=True)
    for version, each_node, what in ((1, False, r"FSDP 1 \(set"), (2, True, "save_on_each_node")):
        configuration = ProjectConfiguration(str(tmp_path), save_on_each_node=each_node)
        with fsdp_without_gpus(version):
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=configuration)
        with pytest.raises(
            fastload.OptionError, match=f"cannot save the state of an Accelerator with {what}"
        ):
            accelerate_integration.attach(accelerator)
        AcceleratorState._reset_state(reset_partial_state=True)


class Progress:
    """Something that a program registers for checkpointing."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def saves_states(rank: int, world: int, tmp_path: Path, fsdp: bool) -> None:
    """What an Accelerator goes on from ends with the weights that it would have had."""
    plugin = None
    if fsdp:
        wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrapped)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    with fsdp_without_gpus():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    if not fsdp and importlib.util.find_spec("peft"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["0"]))
    model._no_split_modules = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    def train(num_steps: int) -> list[torch.Tensor]:
        for _ in range(num_steps):
            accelerator.backward(model(torch.ones(3, 8)).square().sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.steps += 1
        return [local(tensor).clone() for tensor in get_model_state_dict(model).values()]

    if not fsdp:
        train(1)
        accelerator.save_state()  # its own, before
        expected = train(2)
    plain_save = accelerator.save_state
    accelerate_integration.attach(accelerator, in_background=not fsdp)
    if not fsdp:
        accelerator.load_state()
        assert all(map(torch.equal, train(2), expected))
    train(2)
    for _ in range(3):
        accelerator.save_state()
    expected, steps = train(3), progress.steps
    accelerator.load_state()  # the newest
    assert progress.steps == steps - 3
    assert all(map(torch.equal, train(3), expected))
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert len(folders) == 2
    accelerator.wait_for_everyone()
    cut_off = folders[-1].with_name("checkpoint_99")  # as by a save that was killed
    if rank == 0:
        cut_off.mkdir()
        (cut_off / "scheduler.bin").write_bytes(b"")
    accelerator.wait_for_everyone()
    accelerator.load_state()
    assert progress.steps == steps - 3
    assert not cut_off.exists()
    assert project.iteration == int(folders[-1].name.removeprefix("checkpoint_")) + 1
    train(3)
    assert {path.suffix for path in (folders[-1] / "fastload").iterdir()} == {".json", ".safetensors"}
    assert not list(folders[-1].glob("model*"))
    assert not list(folders[-1].glob("optimizer*"))
    if not fsdp:
        project.automatic_checkpoint_naming = False
        accelerator.save_state(str(tmp_path / "state"))
        accelerator.load_state(str(tmp_path / "state"))
        train(1)
        plain_save(str(tmp_path / "state"))  # as one by a program without fastload, or one that is killed
        with pytest.raises(fastload.IncompleteCheckpoint, match=r"state: the files .* not of the same save"):
            accelerator.load_state(str(tmp_path / "state"))
    AcceleratorState._reset_state(reset_partial_state=True)


def tunes(rank: int, world: int, num_steps: int) -> None:
    """Runs the recipe for FSDP2; the first time makes its checkpoint, the second time looks at its export."""
    is_first = not Path("checkpoints").exists()
    dist.barrier()
    if is_first and rank == 0:
        LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)).save_pretrained(
            "pretrained"
        )
        tokenizer = Tokenizer(WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("pretrained")
    dist.barrier()
    os.environ["NUM_STEPS"] = str(num_steps)
    run_program("docs/recipes/fsdp2.md")
    if not is_first:
        saved = fastload.load(f"checkpoints/step_{num_steps:08d}")
        assert saved["step"] == num_steps
        exported, before = (AutoModelForCausalLM.from_pretrained(name) for name in ("export", "pretrained"))
        weights = exported.state_dict()
        assert weights.keys() == saved["model"].keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in saved["model"].items())
        assert not torch.equal(weights["lm_head.weight"], before.state_dict()["lm_head.weight"])
        assert AutoTokenizer.from_pretrained("export")("hello")["input_ids"] == [0]


def runs_the_recipes(rank: int, world: int) -> None:
    run_program("docs/recipes/trainer.md")
    AcceleratorState._reset_state(reset_partial_state=True)
    run_program("docs/recipes/accelerate.md")


def assert_same_tensors(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class Plain(torch.nn.Module):
    """A model that transformers did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(128, 8)
        self.head = torch.nn.Linear(8, 128)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def resumes_from_others(rank: int, world: int, tmp_path: Path) -> None:
    """What a plain Trainer saved, models of other classes, and checkpoints of weights alone."""
    begun: list[int] = []

    class Beginning(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            begun.append(state.global_step)

    def trained(folder: Path, kind: Any, make: Any, resumes: Any = False, **more: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        begun.clear()
        made = trainer_of(folder, kind=kind, model=make(), **more)
        made.add_callback(Beginning())
        made.train(resume_from_checkpoint=resumes)
        return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}

    for make in (llama, Plain):
        plain, own = tmp_path / make.__name__, tmp_path / f"own {make.__name__}"
        expected = trained(plain, Trainer, make)
        assert_same_tensors(trained(own, OurTrainer, make), expected)
        assert_same_tensors(trained(own, OurTrainer, make, str(plain / "checkpoint-4")), expected)
        assert begun[0] == 4
    path = tmp_path / "weights"
    trained(path, OurTrainer, Plain, save_only_model=True, load_best_model_at_end=False)
    assert not (path / "checkpoint-4" / "training_state").exists()
    found = trained(path, OurTrainer, Plain, str(path / "checkpoint-6"), max_steps=7)
    assert begun == [6]
    saved = fastload.load(path / "checkpoint-6")
    assert all((found[name] - tensor).abs().max() < 0.05 for name, tensor in saved.items())


def models_that_are_converted() -> Iterator[Any]:
    """Models whose weights have other names, or are in other pieces, in a checkpoint than in the model."""
    small = {**SIZES, **HEADS}
    of_experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    latent = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }
    yield experts()
    yield transformers.MixtralForCausalLM(transformers.MixtralConfig(**small, num_local_experts=3))
    yield transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **small, **of_experts, **latent, moe_intermediate_size=16, first_k_dense_replace=1
        )
    )
    yield transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, num_attention_heads=4))
    pictures = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    yield transformers.ViTForImageClassification(
        transformers.ViTConfig(**pictures, num_attention_heads=4, image_size=8, patch_size=4)
    )
    layers = {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    of_each = {"attention_heads": 2, "ffn_dim": 16}
    sizes = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in of_each.items()}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
    yield transformers.MarianMTModel(
        transformers.MarianConfig(d_model=16, vocab_size=32, **layers, **sizes, **tokens)
    )


def names_what_loads_converted_models(rank: int, world: int, tmp_path: Path) -> None:
    for model in models_that_are_converted():
        folder = tmp_path / type(model).__name__
        if rank == 0:
            model.save_pretrained(folder)
        dist.barrier()
        for into in (model, {"model": model}, dict(model.state_dict()), torch.nn.Sequential(model)):
            with pytest.raises(fastload.MismatchError) as caught:
                fastload.load(folder, into=into)
            assert "fastload.integrations.transformers.from_pretrained" in str(caught.value)
            assert "strict=False" not in str(caught.value)
        again = from_pretrained(type(model), folder)
        assert_same_tensors(again.state_dict(), type(model).from_pretrained(folder).state_dict())
    # Others are told what they were.
    model = llama()
    fastload.save({"net": {"inner": model}}, tmp_path / "state")
    with pytest.raises(fastload.MismatchError, match=r"pass into=\{'net': \{'inner': model\}\}"):
        fastload.load(tmp_path / "state", into=model)
    fastload.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "plain")
    with pytest.raises(fastload.MismatchError, match=r"strict=False leaves these out"):
        fastload.load(tmp_path / "plain", into={"a": torch.ones(1)})
    with pytest.raises(fastload.MismatchError, match=r"strict=False leaves these out"):
        fastload.load(
            tmp_path / "plain", into=torch.nn.ParameterDict({"a": torch.ones(1), "c": torch.ones(1)})
        )
