"""
Run by test_distributed.py under torchrun: `QKScoreCallback` in a Trainer under one engine. The callback itself asserts
that the engine really ran; the weights at the end are saved whole, so that the test can score them in one process.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from launching import leave_group
from tiny_training import scored_rows, tiny_model, tiny_trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForMaskedLM, Trainer, TrainerCallback

from hf_symqk import QKScoreCallback
from hf_symqk.attention import AttentionLayer


def zero3(persistence_threshold: int) -> dict:
    """DeepSpeed's settings. Parameters with fewer entries than the threshold stay whole once they were gathered."""
    return {
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": persistence_threshold,
        },
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }


SETTINGS = {"zero3": {"deepspeed": zero3(0)}, "zero3_persistent": {"deepspeed": zero3(100_000)}}


class CheckedCallback(QKScoreCallback):
    """Asserts at each measurement that two processes share the work in the way that the engine's name says."""

    def __init__(self, engine: str):
        super().__init__(heads=True, gradients=True)
        self.engine = engine
        self.trainer = None
        self.checked = 0

    def _measure(self, model: nn.Module, state) -> dict[str, float]:
        assert dist.get_world_size() == 2
        assert state.is_world_process_zero == (dist.get_rank() == 0)
        weight = dict(model.named_parameters())["bert.encoder.layer.0.attention.self.query.weight"]
        if self.engine == "ddp":
            assert isinstance(self.trainer.model_wrapped, DistributedDataParallel)
        elif self.engine == "fsdp2":
            assert isinstance(weight, DTensor), type(weight)
            assert weight.to_local().shape == (24, 48)
        elif self.engine == "zero3":
            assert weight.shape == (0,), weight.shape
            assert weight.ds_tensor.numel() == 24 * 48
        elif self.engine == "zero3_persistent":
            assert weight.ds_persist
            assert weight.shape == ((0,) if self.checked == 0 else (48, 48))
        self.checked += 1
        return super()._measure(model, state)


class MeetsItsPeers(TrainerCallback):
    """A callback of somebody else's with a collective in `on_log`: every event has to reach it on every rank."""

    def on_log(self, args, state, control, **kwargs):
        number = torch.ones(1)
        dist.all_reduce(number)
        assert number.item() == 2


class Gathers(Trainer):
    """A metric of all processes where the loss is computed, as trainers of other libraries have it."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        assert self.accelerator.gather_for_metrics(torch.ones(1)).sum() == 2
        return super().compute_loss(model, inputs, *args, **kwargs)


def build(engine: str, folder: Path) -> nn.Module:
    if engine != "fsdp2":
        return tiny_model()
    from transformers.distributed import DistributedConfig

    path = folder / "start"
    if dist.get_rank() == 0:
        tiny_model().save_pretrained(path)
    dist.barrier()
    return AutoModelForMaskedLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2))


def break_rank_one(where: str) -> None:
    """Rank 1 alone fails, in the computation or in what comes between gathering and the computation."""
    import hf_symqk.attention.finding as finding

    if dist.get_rank() != 1:
        return
    if where == "computation":
        original = AttentionLayer.query_key_weights

        def broken(layer):
            context = original(layer)

            class Broken:
                def __enter__(self):
                    context.__enter__()
                    context.__exit__(None, None, None)
                    raise RuntimeError("rank 1 is out of luck")

                def __exit__(self, *error):
                    return None

            return Broken()

        AttentionLayer.query_key_weights = broken
    else:

        def broken_split(self, part, linear):
            raise RuntimeError("rank 1 cannot dequantise")

        finding.AttentionLayer._split = broken_split


def main(engine: str, folder: Path, broken: str) -> None:
    settings = SETTINGS.get(engine, {})
    if settings:
        # Construction has to know of the partitioning: the arguments make it known and must live until then.
        from transformers import TrainingArguments

        known = TrainingArguments(str(folder / "out"), use_cpu=True, report_to="none", **settings)
        assert known.deepspeed
    elif not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # a hang is to end, and be a failure
    model = build(engine, folder)
    callback = CheckedCallback(engine)
    trainer = tiny_trainer(
        folder / "out",
        [callback, MeetsItsPeers()],
        model=model,
        trainer_class=Gathers if broken == "gathering" else Trainer,
        max_steps=3,
        save_strategy="no",
        **settings,
    )
    callback.trainer = trainer
    if broken in ("computation", "dequantisation"):
        break_rank_one(broken)
    trainer.train()
    assert callback.checked == 3, callback.checked
    assert trainer.state.global_step == 3
    trainer.save_model(str(folder / "trained"))
    rows = scored_rows(trainer)
    assert list(rows) == ([0, 2, 3] if dist.get_rank() == 0 else []), "rank 0 logs"
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    leave_group()
