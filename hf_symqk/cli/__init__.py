"""The `symqk` command: scores of checkpoints, where their W_q and W_k were found, what is supported."""

from .app import app, main


__all__ = ["app", "main"]
