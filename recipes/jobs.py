"""Runs of a recipe as processes of their own: started by a launcher, several at once, each with its log."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from arguments import RecipeError
from run_record import RUN_RECORD


__all__ = ["LOG", "Job", "Outcome", "available_cores", "is_under_way", "launcher_words", "run_jobs", "run_record"]

LOG = "log.txt"
LOCK = "_under_way"  # held by a run as long as it lives
_TAIL = 12  # lines of a log that say what went wrong


@dataclasses.dataclass(frozen=True)
class Job:
    """
    One run to be made.

    Attributes:
        name (`str`): What is printed of it.
        folder (`Path`): Its output folder, which also takes its log.
        command (`tuple[str, ...]`): Words of the command.
    """

    name: str
    folder: Path
    command: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """
    How a run ended.

    Attributes:
        job (`Job`): The run.
        problem (`str`): Why it is no finished run; empty if it is one.
        seconds (`float`): How long it took.
    """

    job: Job
    problem: str
    seconds: float

    @property
    def finished(self) -> bool:
        """Whether the launcher ended well and the record says that the run did."""
        return not self.problem


def launcher_words(launcher: str) -> tuple[str, ...]:
    """
    The words of a launcher; its program is the one beside this Python, whose libraries the run then has, or else what
    a shell would find.

    Args:
        launcher (`str`):
            As a shell takes it: `"accelerate launch"`, `"torchrun --nproc_per_node 2"`.

    Returns:
        `tuple[str, ...]`

    Raises:
        RecipeError: if it is empty, cannot be read, or its program is not found.
    """
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise RecipeError(f"launcher={launcher!r} cannot be read: {error}") from None
    if not words:
        raise RecipeError("launcher is empty: give a command such as 'accelerate launch', 'torchrun' or 'python'.")
    beside = Path(sys.executable).parent / words[0]
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(words[0])
    if found is None:
        raise RecipeError(f"launcher={launcher!r}: there is no program {words[0]!r}.")
    return (found, *words[1:])


def run_record(folder: Path) -> dict[str, Any] | None:
    """
    Reads the record of a run.

    Args:
        folder (`Path`):
            Output folder.

    Returns:
        `dict` or `None`: with a `status` of `running`, `finished` or `failed`; `None` without a record.

    Raises:
        RecipeError: if the record cannot be read.
    """
    path = folder / RUN_RECORD
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        content["status"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{str(path)!r} is no record of a run ({error}): remove the folder to repeat it.") from None
    return content


def is_under_way(folder: Path) -> bool:
    """
    Whether a run that [`run_jobs`] started is still at work, as it is where the program that waited for it was killed.

    Args:
        folder (`Path`):
            Output folder.

    Returns:
        `bool`
    """
    if not (folder / LOCK).is_file():
        return False
    with (folder / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], at_once: int, announce: Callable[[str], None] = print) -> list[Outcome]:
    """
    Makes the runs, and goes on when one fails. An interrupt ends those that are under way.

    Args:
        jobs (sequence of `Job`):
            The runs.
        at_once (`int`):
            How many of them at a time; they share the cores by `OMP_NUM_THREADS`, unless that is set.
        announce (`Callable`, *optional*):
            Takes the lines that say what is going on.

    Returns:
        `list[Outcome]`: in the order of the jobs.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    stopped = threading.Event()
    lock = threading.Lock()

    def run(position: int, job: Job) -> Outcome:
        with lock:
            if stopped.is_set():
                return Outcome(job, "not started", 0.0)
            announce(f"[{position}/{len(jobs)}] {job.name}: started, log in {job.folder / LOG}")
            begun = time.monotonic()
            job.folder.mkdir(parents=True, exist_ok=True)
            try:
                process = processes[job.name] = _start(job, at_once)
            except OSError as error:
                return Outcome(job, f"cannot be started: {error}", 0.0)
        code = process.wait()
        with lock:
            del processes[job.name]
            outcome = Outcome(job, "" if stopped.is_set() else _problem(job, code), time.monotonic() - begun)
            if stopped.is_set():
                outcome = dataclasses.replace(outcome, problem="interrupted")
            ended = "finished" if outcome.finished else "failed"
            more = f": {outcome.problem}" if outcome.problem else ""
            announce(f"[{position}/{len(jobs)}] {job.name}: {ended} after {outcome.seconds:.0f} s{more}")
        return outcome

    pool = ThreadPoolExecutor(max_workers=at_once)
    try:
        futures = [pool.submit(run, position, job) for position, job in enumerate(jobs, 1)]
        return [future.result() for future in futures]
    except BaseException:
        stopped.set()
        for process in list(processes.values()):
            _end(process)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(job: Job, at_once: int) -> subprocess.Popen[bytes]:
    """In a session of its own, so that what the launcher starts can be ended with it. It inherits the lock, and so
    holds it even if this process is killed."""
    with (job.folder / LOG).open("ab") as log, (job.folder / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return subprocess.Popen(
            job.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(at_once),
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )


def _environment(at_once: int) -> Mapping[str, str]:
    environment: dict[str, Any] = dict(os.environ)
    if at_once > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // at_once)))
        # torchrun's own default is one port for all, which the second run would find taken.
        environment.setdefault("PET_MASTER_PORT", str(_free_port()))
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _problem(job: Job, code: int) -> str:
    if code != 0:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{how}\n{_tail(job)}"
    try:
        record = run_record(job.folder)
    except RecipeError as error:
        return str(error)
    status = None if record is None else record["status"]
    if status != "finished":
        return f"exit status 0, but {RUN_RECORD} says {status!r}\n{_tail(job)}"
    return ""


def _tail(job: Job) -> str:
    lines = (job.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in [line for line in lines if line.strip()][-_TAIL:])


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=10)
