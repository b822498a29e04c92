"""Run a program on several ranks, in processes that are forked from one that has imported the libraries.

This is what torchrun does, without the seconds that each of its processes needs for the imports.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

_LIBRARIES = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "timm", "torchvision", "hookdrop"]
_context = multiprocessing.get_context("forkserver")


def run_ranks(program: Path, *arguments: object, ranks: int, timeout: float = 300) -> str:
    """The output of all ranks; if one fails, assert with their output."""
    _context.set_forkserver_preload(_LIBRARIES)
    with TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.txt") for rank in range(ranks)]
        job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
        jobs = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        calls = [(str(program), [*map(str, arguments)], *one) for one in zip(jobs, logs, strict=True)]
        processes = [_context.Process(target=_run, args=call) for call in calls]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
            process.kill()
            process.join()
        output = "".join(log.read_text() for log in logs if log.exists())
    assert [process.exitcode for process in processes] == [0] * ranks, output
    return output


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def _run(program: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """Run in a new process."""
    import torch

    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    torch.set_num_threads(1)
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
