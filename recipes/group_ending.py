"""The end of a run in several processes, with no thread of their group left."""

from __future__ import annotations

import gc
import importlib
import os

from accelerate.utils import is_deepspeed_available
from transformers import Trainer


__all__ = ["GroupEndingTrainer"]

# Accelerate imports it in every run where it is installed. Imported once there is a group, it keeps the group until
# the process exits, as the default of an argument (DeepSpeed 0.19); so it comes first, and costs no more.
if int(os.environ.get("WORLD_SIZE", "1")) > 1 and is_deepspeed_available():
    importlib.import_module("deepspeed")


class GroupEndingTrainer(Trainer):
    """`Trainer` whose [`~GroupEndingTrainer.end`] leaves no thread of the process group behind."""

    def end(self) -> None:
        """
        Ends trackers and the process group, as `Trainer.end` does; the last call of a run.

        Gloo's threads let go of the tensors of a collective after it has returned, for which they need the
        interpreter's lock (PyTorch 2.13): one that is late aborts a process that is exiting meanwhile, and one that a
        `DistributedDataParallel` waits for, as the last holder of the group, waits for ever. So the wrapper goes
        first, and the group, which then waits for its threads without the lock, goes last. What shards a model over
        gloo can hold the group for longer.
        """
        assert self.model is not None
        self.model_wrapped = self.model
        self.accelerator.free_memory()
        gc.collect()
        super().end()
