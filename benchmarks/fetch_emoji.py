"""Download the images of the dataset `emoji` with npm: `python benchmarks/fetch_emoji.py`.

It downloads two npm packages, 136 MB, and unpacks 41 MB of them below --root, where `compare.py` looks for them. npm
verifies their checksums. Nothing is installed, and no script of a package is executed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from comparison.data.emoji import VENDORS, VERSION, folder

LICENSES = {"google": "Noto Emoji, Apache License 2.0", "twitter": "Twemoji, CC BY 4.0"}


def main(argv: Sequence[str] | None = None) -> int:
    """Download the packages that are missing. Return 1 if that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder for the packages (default: data)")
    root = parser.parse_args(argv).root
    for vendor in VENDORS:
        target, package = folder(root, vendor), f"emoji-datasource-{vendor}@{VERSION}"
        try:
            print(f"{target}: {package if fetch(root, vendor) else 'already there'} ({LICENSES[vendor]})")
        except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
            reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            print(
                f"Cannot download {package} with npm, which Node.js includes: {reason}.\n  run this again,\n"
                f"  or unpack version {VERSION} of the npm package as {target}",
                file=sys.stderr,
            )
            return 1
    return 0


def fetch(root: Path, vendor: str) -> bool:
    """Download and unpack a vendor's package. Return False if it is there."""
    target = folder(root, vendor)
    if target.is_dir():
        return False
    root.mkdir(parents=True, exist_ok=True)
    wanted = tuple(f"package/{name}" for name in ("package.json", "emoji.json", "LICENSE", "README.md"))
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        package = f"emoji-datasource-{vendor}@{VERSION}"
        command = ["npm", "pack", package, "--silent", "--pack-destination", temporary]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        with tarfile.open(next(Path(temporary).glob("*.tgz"))) as files:
            members = [one for one in files if one.name.startswith((*wanted, f"package/img/{vendor}/64/"))]
            files.extractall(temporary, members, filter="data")
        # A folder with this name is complete, even if the download is interrupted.
        shutil.move(Path(temporary, "package"), target)
    return True


if __name__ == "__main__":
    sys.exit(main())
