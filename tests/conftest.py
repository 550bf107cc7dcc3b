"""Settings that every test needs, and its processes: no network, no warnings of tokenizers, stacks at a crash."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
