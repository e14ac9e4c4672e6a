"""What `roformer launch` writes, run by bash with stand-ins for Slurm's commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.loader import ConfigError, load
from launch.cli import main
from launch.scripts import Call, Element, quote, slurm_script
from tests.launch.examples import EXAMPLES, TEMPLATES

SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.mark.parametrize("name", EXAMPLES)
def test_scripts_are_golden_and_clean(name):
    assert EXAMPLES[name]() == (TEMPLATES / name).read_text(encoding="utf-8")
    done = subprocess.run(
        [SHELLCHECK, "--norc", TEMPLATES / name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


STRANGE = {
    "BLANKS": " a  b ",
    "COMMA": "a,b=c,d",
    "QUOTES": 'it\'s "so"',
    "BRACKETS": "[a](b){c}<d>",
    "LINES": "one\ntwo\n",
    "TABS": "a\tb\rc\\n",
    "DOLLAR": "$HOME `id` $(id) ${X}",
    "EMPTY": "",
    "GLOB": "* ? !x ~ # & ; |",
    "UNICODE": "中文 é",
}


@pytest.mark.parametrize("text", [*STRANGE.values(), "\x01\x7f", "plain"])
def test_quoted_text_is_what_bash_reads(text):
    done = subprocess.run(
        ["bash", "-c", f"printf %s {quote(text)}"], capture_output=True, check=True
    )
    assert done.stdout.decode() == text


class Slice:
    """One start of a job's script, with stand-ins for what Slurm has on a node."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.run = folder / "runs" / "tiny"
        self.script = folder / "job.sh"
        self.script.write_text(script)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.stub("scontrol", 'case $1 in show) echo n7; echo n8;; *) echo "$*" >>requeued;; esac')
        self.stub("squeue", "echo RUNNING")

    def stub(self, name: str, body: str) -> None:
        file = self.bin / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)

    def start(self, srun: str, *, restart: int = 0, **environment: str) -> tuple[int, str]:
        """Run the script with a stand-in for srun; return its exit code and output."""
        self.stub("srun", srun)
        slurm = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "n[7-8]"}
        done = subprocess.run(
            ["bash", self.script],
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "SLURM_RESTART_COUNT": str(restart),
                **slurm,
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def requeued(self) -> str:
        file = self.folder / "requeued"
        return file.read_text() if file.exists() else ""


SAVES = "mkdir -p runs/tiny/checkpoints/step-0000000{n}; touch runs/tiny/requeue; "
SAVES += "touch runs/tiny/checkpoints/step-0000000{n}/MANIFEST.json"


@pytest.fixture
def slice_of(tiny_config, tmp_path):
    def make(*overrides: str, arrays: bool = False) -> Slice:
        words = ("run.dir=runs", "launch.nodes=2", *overrides)
        call = Call(tiny_config, words, tmp_path)
        elements = [Element(f"runs/s{n}", (f"run.name=s{n}",)) for n in range(2)]
        return Slice(
            tmp_path, slurm_script(load(tiny_config, words), call, elements if arrays else ())
        )

    return make


def test_ranks_get_environment_arguments_and_rendezvous(slice_of, tmp_path):
    overrides = [f"launch.environment.{k}={json.dumps(v)}" for k, v in STRANGE.items()]
    job = slice_of(*(o.replace("${X}", "\\\\${X}") for o in overrides), "run.seed=5")
    dump = f"{sys.executable} -c 'import os, sys, json; "
    dump += 'json.dump([sys.argv[1:], dict(os.environ)], open("seen", "w"))\' "$@"'
    code, output = job.start(f"{dump}; touch runs/tiny/done", restart=3)
    assert code == 0, output
    arguments, environment = json.loads((tmp_path / "seen").read_text())
    for name, value in STRANGE.items():
        assert environment[name] == value, name
    assert environment["MASTER_ADDR"] == "n7"
    assert environment["MASTER_PORT"] == str(20000 + 7 * 1234 + 3)
    assert environment["ROFORMER_RANKS"] == "2"
    assert {"--export=ALL", "--kill-on-bad-exit=1", "--nodes=2", "run.seed=5"} <= set(arguments)
    assert overrides[0] in arguments


def test_a_slice_that_saved_is_queued_again_while_it_runs(slice_of):
    job = slice_of()
    assert job.start(SAVES.format(n=1))[0] == 0
    assert job.requeued == "requeue 1234\n"


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", ""])
def test_a_cancelled_job_does_not_come_back(slice_of, state):
    job = slice_of()
    job.stub("squeue", f"echo {state}")
    assert job.start(SAVES.format(n=1))[0] == 75
    assert not job.requeued


def test_a_slice_without_progress_is_not_queued_again(slice_of):
    job = slice_of()
    assert job.start(SAVES.format(n=1))[0] == 0
    code, output = job.start(SAVES.format(n=1), restart=1)
    assert code == 1
    assert "no step further" in output
    assert job.start(SAVES.format(n=2), restart=2)[0] == 0
    assert job.requeued.count("requeue") == 2


def test_requeues_have_an_end(slice_of):
    job = slice_of("launch.slurm.max_requeues=3")
    assert job.start(SAVES.format(n=1), restart=3)[0] == 75
    assert not job.requeued


@pytest.mark.parametrize(("srun", "code"), [("exit 3", 3), ("exit 0", 1), ("kill -9 $$", 137)])
def test_a_failure_is_not_queued_again(slice_of, srun, code):
    job = slice_of()
    job.run.mkdir(parents=True)
    (job.run / "requeue").touch()  # the last slice's
    assert job.start(srun)[0] == code
    assert not job.requeued


def test_slurms_signal_becomes_the_stop_file_and_the_wait_goes_on(slice_of):
    job = slice_of()
    waits = "kill -USR1 $PPID; until [ -e runs/tiny/stop ]; do sleep 0.01; done; sleep 0.3; "
    waits += "kill -TERM $PPID; sleep 0.1; rm runs/tiny/stop; "
    code, output = job.start(waits + SAVES.format(n=1))
    assert code == 0, output
    assert output.count("asked to stop") == 2
    assert job.requeued
    assert not (job.run / "stop").exists()


def test_the_last_slices_stop_file_does_not_stop_the_next(slice_of):
    job = slice_of()
    job.run.mkdir(parents=True)
    (job.run / "stop").touch()
    assert job.start("[ -e runs/tiny/stop ] || touch runs/tiny/done")[0] == 0


def test_elements_of_an_array_have_runs_of_their_own(slice_of, tmp_path):
    job = slice_of(arrays=True)
    array = {"SLURM_ARRAY_JOB_ID": "1233", "SLURM_ARRAY_TASK_ID": "1"}
    srun = 'echo "$*" >arguments; touch runs/s1/requeue'
    assert job.start(f"mkdir -p runs/s1/checkpoints/step-00000001; {srun}", **array)[0] == 1
    assert "run.dir=runs launch.nodes=2 run.name=s1" in (tmp_path / "arguments").read_text()
    saved = "touch runs/s1/checkpoints/step-00000001/MANIFEST.json"
    assert job.start(f"{saved}; {srun}", **array)[0] == 0
    assert job.requeued == "requeue 1233_1\n"  # and not all elements
    assert job.start("true", **(array | {"SLURM_ARRAY_TASK_ID": "7"}))[0] == 2


def test_printed_script_is_the_script_alone(tiny_config, capsys):
    assert main(["launch", str(tiny_config), "--slurm", "launch.nodes=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n# tiny: 2 ranks on 2 nodes\n")
    assert "#SBATCH --nodes=2\n" in out
    assert not (tiny_config.parent / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "give --slurm, or --hostfile"),
        (["--slurm", "launch.num_processes=auto"], "launch.num_processes: auto counts"),
        (["--slurm", "launch.nodes=3"], "don't divide over launch.nodes=3"),
        (["--slurm", "launch.slurm.time=24h"], "none of Slurm's forms"),
        (["--slurm", "launch.slurm.time=3:00"], "no time to train is left"),
        (["--slurm", "launch.slurm.partition=a b"], "launch.slurm.partition"),
        (["--slurm", "launch.slurm.options=[exclusive]"], "launch.slurm.options"),
        (["--slurm", "launch.environment.MLFLOW_TRACKING_TOKEN=x"], "is a secret"),
        (["--slurm", "launch.environment.a-b=x"], "launch.environment"),
        (["--slurm", "launch.num_processes=2", "launch.slurm.gpus_per_node=1"], "1 GPUs don't"),
        (["--slurm", "data.train=nowhere"], "nowhere"),
        (["--hostfile", "nowhere"], "hostfile nowhere: No such file"),
        (["--hostfile", "hosts", "--array", "arms"], "an array needs --slurm"),
    ],
)
def test_what_could_not_run_is_refused(tiny_config, capfd, arguments, fault):
    assert main(["launch", str(tiny_config), *arguments]) == 2
    error = capfd.readouterr().err
    assert fault in error
    assert "Traceback" not in error
    assert not (tiny_config.parent / "runs").exists()


def test_submitting_needs_sbatch(tiny_config, capfd, monkeypatch):
    monkeypatch.setenv("PATH", str(tiny_config.parent))
    assert main(["launch", str(tiny_config), "--slurm", "--submit"]) == 2
    assert "no sbatch" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 5400), ("90:30", 5430), ("1:00:00", 3600), ("24:00:00", 86400)),
        *(("2-0", 172800), ("1-12", 129600), ("1-12:30", 131400), ("1-12:30:10", 131410)),
        *(("UNLIMITED", None), ("infinite", None)),
    ],
)
def test_slurms_forms_of_time(tiny_config, text, seconds):
    assert load(tiny_config, [f"launch.slurm.time={text}"]).launch.slurm.time_s == seconds


@pytest.mark.parametrize("text", ["", "1:2:3:4", "1-1:2:3:4", "h", "-5"])
def test_other_forms_of_time_are_refused(tiny_config, text):
    with pytest.raises(ConfigError, match=r"launch\.slurm\.time"):
        load(tiny_config, [f"launch.slurm.time={text}"])


@pytest.mark.parametrize(
    ("array", "names"),
    [
        ("seeds", ["rope-seed1", "rope-seed2"]),
        ("arms", ["rope-seed1", "learned-seed1", "rope-seed2", "learned-seed2"]),
    ],
)
def test_an_array_has_an_element_a_run(tiny_config, capsys, array, names):
    assert (
        main(["launch", str(tiny_config), "--slurm", "--array", array, "compare.seeds=[1,2]"]) == 0
    )
    out = capsys.readouterr().out
    assert f"#SBATCH --array=0-{len(names) - 1}\n" in out
    for number, name in enumerate(names):
        start = out.index(f"  {number})\n")
        assert f"run.name={name}\n" in out[start : out.index(";;", start)]
    assert not (tiny_config.parent / "runs").exists()


def test_shards_are_an_array_and_a_job_that_joins_it(tiny_config, capsys):
    assert main(["launch", str(tiny_config), "--slurm", "--shards", "4"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --array=0-3\n" in out
    assert '--part "$SLURM_ARRAY_TASK_ID/4"\n' in out
    assert "--merge'\n" in out


def test_a_hostfile_makes_a_script_for_ssh_and_for_each_host(tiny_config, tmp_path, capsys):
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=2\nn2 slots=2\nn3 slots=2\n")
    words = ["launch", str(tiny_config), "--hostfile", str(hosts), "--exclude", "n3", "run.seed=3"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "pdsh -S -f 2 -w n1,n2 " in out
    assert f"--hostfile {hosts} --exclude n3 --no_ssh --node_rank" in out
    assert "export ROFORMER_RANKS=4 " in out
    assert out.endswith(f"--module launch.train {tiny_config} run.seed=3\n")
