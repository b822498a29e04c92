"""Programs import this first: they then name all packages that they lack, with the command that installs them."""

import runpy
import sys
from pathlib import Path


def report(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Print a message instead of the traceback of a `ModuleNotFoundError`."""
    if not isinstance(error, ModuleNotFoundError):
        return sys.__excepthook__(kind, error, trace)
    extras = runpy.run_path(str(Path(__file__).parents[1] / "hookdrop/extras.py"))  # without PyTorch
    message = extras["missing_packages"](error.name, "compare", *["transformers"] * (error.name == "transformers"))
    return print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


sys.excepthook = report
