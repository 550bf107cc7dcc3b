"""
Run by test_distributed.py under torchrun: `score_model` in a plain training loop, without a Trainer, under one
engine. Asserts that the engine really ran. Each rank leaves its scores, rank 0 the whole weights, gathered by the
engine's own means.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from architectures import BY_NAME
from launching import leave_group
from tiny_training import Tokens
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_symqk import QKScoreCallback, find_attention_layers, score_model


STEPS = 2
# Columns of tensor parallel attention modules: the projections that split by head, then the one that joins them.
TENSOR_PARALLEL = {
    "bert": (["self.query", "self.key", "self.value"], "output.dense"),
    "llama": (["q_proj", "k_proj", "v_proj"], "o_proj"),
}


def build(name: str, **overrides: bool) -> PreTrainedModel:
    """The same model on every rank, symmetric at the start."""
    torch.manual_seed(0)
    if name == "llama":
        return AutoModelForCausalLM.from_config(BY_NAME[name].config(**overrides), qk_init="symmetric")
    # Under tensor parallelism ranks run in step only without dropout.
    config = BY_NAME[name].config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **overrides)
    return AutoModelForMaskedLM.from_config(config, qk_init="symmetric")


def query_key(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Q and K of the first layer as the engine holds them."""
    layer = find_attention_layers(model)[0]
    query, key = layer.holder("query").weight, layer.holder("key").weight
    assert isinstance(query, Tensor)
    assert isinstance(key, Tensor)
    return query, key


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches, backward: Callable[[Tensor], None]) -> None:
    model.train()
    for _, batch in zip(range(STEPS), batches, strict=False):
        backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


# --- engines ------------------------------------------------------------------------------------------------------


def accelerated(engine: str) -> tuple[nn.Module, Accelerator]:
    """A model that `accelerate` prepared, trained, on the CPU."""
    PartialState(cpu=True)  # which must not be told to the accelerator too: that leaves DeepSpeed out
    if engine == "ddp":
        accelerator = Accelerator(cpu=True)
    elif engine == "zero3":
        settings = {
            "zero_optimization": {
                "stage": 3,
                "stage3_gather_16bit_weights_on_model_save": True,
                "stage3_param_persistence_threshold": 0,
            },
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
        }
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    else:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["BertLayer"],
            cpu_ram_efficient_loading=False,
            state_dict_type="FULL_STATE_DICT",
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        # It offers FSDP on accelerators only; told that this is FSDP, it does here what it does there.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    # accelerate's FSDP2 does not know of the bias that BERT's head ties together with its weight.
    model = build("bert", tie_word_embeddings=engine != "fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Tokens(), batch_size=4))
    train(model, optimizer, batches, accelerator.backward)
    return model, accelerator


def tensor_parallel(name: str) -> nn.Module:
    """A model whose attention is split by heads in the way of torch, trained."""
    mesh = init_device_mesh("cpu", (2,))
    model = build(name)
    columns, rows = TENSOR_PARALLEL[name]
    plan = {**dict.fromkeys(columns, ColwiseParallel()), rows: RowwiseParallel()}
    for layer in find_attention_layers(model):
        # BERT's output projection is beside the module that has Q and K.
        path = layer.name.rpartition(".")[0] if name == "bert" else layer.name
        parallelize_module(model.get_submodule(path), mesh, plan)
    # Ranks see the same batches; plain and distributed parameters do not mix in one fused update.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train(model, optimizer, DataLoader(Tokens(), batch_size=4), lambda loss: loss.backward())
    return model


def tensor_parallel_of_transformers(folder: Path) -> nn.Module:
    """A model that Transformers loads in parts, by its own plan for Llama."""
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        build("llama").save_pretrained(folder / "start")
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder / "start", distributed_config=DistributedConfig(tp_size=2))


def prepare(engine: str, folder: Path) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    """A model and what gathers its weights."""
    if engine == "zero3":
        model, accelerator = accelerated(engine)
        return model, lambda: accelerator.get_state_dict(model)
    if engine in ("ddp", "fsdp2"):
        model, _ = accelerated(engine)
    elif engine == "tp_transformers":
        dist.init_process_group("gloo")
        model = tensor_parallel_of_transformers(folder)
    else:
        dist.init_process_group("gloo")
        model = tensor_parallel(engine.removeprefix("tp_"))
    return model, lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def check(engine: str, model: nn.Module) -> None:
    """Two processes share the model in the way that the engine's name says."""
    assert dist.get_world_size() == 2
    assert dist.get_backend() == "gloo"
    query, key = query_key(model)
    if engine == "ddp":
        assert isinstance(model, DistributedDataParallel), type(model)
        assert type(query) is nn.Parameter
    elif engine == "fsdp2":
        assert isinstance(model, FSDPModule), type(model)
        assert isinstance(query, DTensor), type(query)
        assert query.to_local().shape == (24, 48)
    elif engine == "zero3":
        assert query.shape == (0,), query.shape
        assert query.ds_tensor.numel() == 24 * 48
    else:
        for weight, heads in ((query, 4), (key, 4)) if engine == "tp_bert" else ((query, 6), (key, 2)):
            width = 12 if engine == "tp_bert" else 16
            assert isinstance(weight, DTensor), type(weight)
            assert weight.placements == (Shard(0),)
            assert weight.to_local().shape == (heads // 2 * width, 48), weight.to_local().shape


# --- FSDP1, which is refused --------------------------------------------------------------------------------------


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def refused(folder: Path) -> None:
    """FSDP1 is refused by name; a callback says so once, and a loop that drives it goes on."""
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    model = build("bert")
    wrap = ModuleWrapPolicy({type(model.bert.encoder.layer[0])})
    model = FullyShardedDataParallel(model, auto_wrap_policy=wrap, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, DataLoader(Tokens(), batch_size=4), lambda loss: loss.backward())
    flattened = FullyShardedDataParallel(
        build("bert"), auto_wrap_policy=wrap, use_orig_params=False, device_id=torch.device("cpu")
    )
    for sharded in (model, model.module, flattened):
        with pytest.raises(ValueError, match=r"FSDP1.*Use FSDP2"):
            score_model(sharded)
    records = Records()
    logging.getLogger("hf_symqk").addHandler(records)
    callback = QKScoreCallback()
    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, report_to="none")
    state, control = TrainerState(is_world_process_zero=dist.get_rank() == 0), TrainerControl()
    callback.on_train_begin(arguments, state, control, model=model)
    for step in (1, 2):
        state.global_step = step
        logs = {"loss": 1.0}
        state.log_history.append({**logs, "step": step})
        control.should_log = True
        callback.on_step_end(arguments, state, control, model=model)
        callback.on_log(arguments, state, control, model=model, logs=logs)
        assert logs == {"loss": 1.0}
    assert len(records.messages) == 1, records.messages
    assert "FSDP1" in records.messages[0]
    assert "FSDP2" in records.messages[0]


def main(engine: str, folder: Path) -> None:
    if engine == "fsdp1":
        refused(folder)
    else:
        model, gather = prepare(engine, folder)
        check(engine, model)
        score_model(model).to_json(folder / f"scores_{dist.get_rank()}.json")
        check(engine, model)  # scoring leaves nothing gathered
        weights = gather()
        if dist.get_rank() == 0:
            torch.save(weights, folder / "weights.pt")
    dist.barrier()
    (folder / f"done_{dist.get_rank()}").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
    leave_group()
