"""How tests start a program in real processes."""

import sys


__all__ = ["in_processes"]


def in_processes(number: int = 2) -> list[str]:
    """Words in front of a script, which then runs in so many processes that meet at a port that is free."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]
