"""Print the figures of the package's structure: `python benchmarks/structure.py [CHECKOUT]`.

With the path of another checkout, it measures that one, so that two versions can be compared.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

_MEMBERS = """
import json, torch, hookdrop
module = set(dir(torch.nn.Module))
def public(cls):
    return sum(not name.startswith("_") and name not in module for name in dir(cls))
print(json.dumps([public(hookdrop.Injection), public(hookdrop.Regularizer)]))
"""


def measure(root: Path) -> dict[str, int]:
    """Return the figures of the package in the checkout `root`, by name."""
    package = root / "hookdrop"
    texts = {str(file.relative_to(package)): file.read_text() for file in sorted(package.rglob("*.py"))}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    loaded = _python(root, "-X", "importtime", "-c", "import hookdrop").stderr
    injection, regularizer = json.loads(_python(root, "-c", _MEMBERS).stdout)
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == ["hookdrop"])
    entries = [path for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return {
        "lines of the package": sum(lines.values()),
        "files of the package": len(texts),
        "modules at `import hookdrop`": len(set(re.findall(r"\|\s+(hookdrop[\w.]*)$", loaded, flags=re.M))),
        "public members of Injection": injection,
        "public members of Regularizer": regularizer,
        "`# type: ignore`": sum(text.count("# type: ignore") for text in texts.values()),
        "lines of guards/": sum(lines[name] for name in lines if name.startswith("guards/")),
        "entries at the root": len(entries),
        "import levels": len(layers),
    }


def _python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=env, cwd=root)


if __name__ == "__main__":
    for name, value in measure(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()).items():
        print(f"{value:8,} {name}")
