import os
import subprocess
import sys

import pytest

from tests.integration.processes import ROOT

RANK = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from launch.rank_log import RankLog

log = RankLog()
rank = int(sys.argv[2])
log.open(Path(sys.argv[1]), SimpleNamespace(rank=rank, is_first=rank == 0))
print("a word")
os.system("echo of a child >&2")
for number in range(40):
    print("line", number, file=sys.stderr)
log.repeat_last_lines()
"""


def be_rank(folder, rank: int) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(folder), str(rank)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


def test_first_rank_keeps_the_terminal(tmp_path):
    out, err = be_rank(tmp_path, 0)
    assert out == "a word\n"
    assert err.startswith("of a child\nline 0\n")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("starts", [1, 2])
def test_others_write_to_the_run_folder_and_repeat_the_end_of_this_start(tmp_path, starts):
    for _ in range(starts):
        out, err = be_rank(tmp_path, 1)
    log = tmp_path / "logs" / "rank-00001.log"
    assert out == ""
    head, *lines = err.splitlines()
    assert head.startswith("roformer: rank 1 on ")
    assert head.endswith(f"failed; the last lines of {log}:")
    assert lines == [f"  line {number}" for number in range(15, 40)]
    written = log.read_text()
    assert written.count("--- ") == written.count("of a child") == starts
    assert written.count("a word\n") == starts
