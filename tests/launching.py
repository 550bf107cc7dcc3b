"""How tests start a program in real processes."""

import gc
import sys
from pathlib import Path

import torch.distributed as dist


__all__ = ["group_threads", "in_processes", "leave_group"]


def in_processes(number: int = 2) -> list[str]:
    """Words in front of a script, which then runs in so many processes that meet at a port that is free."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]


def group_threads() -> list[str]:
    """Names of this process's threads that serve a process group over gloo (on Linux; none elsewhere)."""
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def leave_group() -> None:
    """
    The end of a script that ran in several processes, its models gone: see `GroupEndingTrainer.end`. What shards a
    model can hold the group for longer; the last collective is a barrier therefore, with no tensors to let go of.
    """
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
