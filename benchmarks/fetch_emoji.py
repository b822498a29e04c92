"""Download the images of the dataset `emoji` with npm: `python benchmarks/fetch_emoji.py`.

It downloads two npm packages, 136 MB, and unpacks 41 MB of them below --root, where `compare.py` looks for them. npm
verifies their checksums. Nothing is installed, and no script of a package is executed.
"""

from __future__ import annotations

import argparse
import json
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
    args = parser.parse_args(argv)
    try:
        for vendor in VENDORS:
            print(fetch(args.root, vendor))
    except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        names = " and ".join(str(folder(args.root, vendor)) for vendor in VENDORS)
        print(
            f"Cannot download the images with npm, which Node.js includes: {reason}.\n  run this again,\n"
            f"  or unpack version {VERSION} of the npm packages as {names}",
            file=sys.stderr,
        )
        return 1
    return 0


def fetch(root: Path, vendor: str) -> str:
    """Download and unpack a vendor's package, unless it is there. Return a description of it.

    Raises:
        OSError: npm is not installed, or the disk is full.
        subprocess.CalledProcessError: npm failed.
        tarfile.TarError: The archive is damaged.
    """
    target, package = folder(root, vendor), f"emoji-datasource-{vendor}@{VERSION}"
    if target.is_dir():
        return f"{target}: already there; delete it to download {package} again"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        command = ["npm", "pack", package, "--silent", "--pack-destination", temporary]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        archive = next(Path(temporary).glob("*.tgz"))
        size = archive.stat().st_size
        _unpack(archive, Path(temporary), vendor)
        # A folder with this name is complete, even if the download is interrupted.
        shutil.move(Path(temporary, "package"), target)
    about = json.loads((target / "package.json").read_text())
    images = len(list((target / "img" / vendor / "64").iterdir()))
    return f"{target}: {package}, {size / 1e6:.0f} MB, {images:,} images ({LICENSES[vendor]}), {about['homepage']}"


def _unpack(archive: Path, into: Path, vendor: str) -> None:
    wanted = ("package/package.json", "package/emoji.json", "package/LICENSE", "package/README.md")
    with tarfile.open(archive) as files:
        members = [one for one in files if one.name in wanted or one.name.startswith(f"package/img/{vendor}/64/")]
        files.extractall(into, members, filter="data")


if __name__ == "__main__":
    sys.exit(main())
