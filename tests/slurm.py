"""A real Slurm of several nodes in one machine, for tests.

Each node has a network, a host name, processes and a /dev/shm of its own over the same file system;
a bridge joins them. Needs root and the programs of Debian's slurm-wlm, munge, iproute2; installs
nothing.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.distributed import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "ip", "unshare", "nsenter")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def obstacle() -> str | None:
    """Say what keeps a Slurm from running here; None where nothing does."""
    if os.geteuid() != 0:
        return "a Slurm of several nodes needs root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: install slurm-wlm, munge and iproute2"
    probe = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else None


def wait_for(what: str, ready: Callable[[], object], timeout_s: float = 300) -> None:
    """Poll until something is so."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)


@dataclass
class Cluster:
    """A running Slurm."""

    folder: Path
    names: tuple[str, ...]
    net: str
    """First three bytes of its addresses."""
    bridge: str
    _nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which Slurm's commands find it."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str | Path, check: bool = True, **more: str) -> str:
        """Run a command beside the nodes, as on a login node; return what it prints."""
        done = subprocess.run(
            [*map(str, command)],
            env=self.environment | more,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def on(self, node: str, *command: str) -> list[str]:
        """Return the command that runs another one on a node, in the folder that we are in."""
        enter = ["nsenter", f"-t{self._pid(node)}", *"-n -u -i -p -m".split()]
        return [*enter, f"--wdns={Path.cwd()}", "--", *command]

    def job(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, timeout_s: float = 240) -> dict[str, str]:
        """Wait for a job's end; return what Slurm knows of it."""
        wait_for(f"the end of job {job}", lambda: self.job(job)["JobState"] in OVER, timeout_s)
        return self.job(job)

    def processes(self, node: str) -> list[str]:
        """Return the command lines of what runs on a node, but for its daemons."""
        first = "1"  # the node's first process: see `boot`
        listing = self.on(node, "ps", "--deselect", "--pid", first, "-o", "args=")
        listed = subprocess.run(listing, capture_output=True, text=True, check=True)
        own = re.compile(r"(/usr/sbin/)?(slurmd|slurmstepd|sshd: /usr/sbin/sshd)\b|ps --|\[.*\]$")
        return [line for line in listed.stdout.splitlines() if not own.match(line)]

    def wait_until_empty(self, timeout_s: float = 60) -> None:
        """Wait until no process but daemons is on any node.

        Raises:
            AssertionError: With the processes that stay.
        """

        def left() -> dict[str, list[str]]:
            return {node: lines for node in self.names if (lines := self.processes(node))}

        try:
            wait_for("the nodes' last process", lambda: not left(), timeout_s)
        except TimeoutError:
            assert left() == {}

    def crash(self, node: str) -> None:
        """Cut a node's power."""
        self._nodes[node].kill()
        self._nodes.pop(node).wait()

    def boot(self, node: str) -> None:
        """Start a node."""
        number = self.names.index(node) + 1
        inside = f"""
            until ip link set eth0 up 2>/dev/null; do sleep 0.02; done
            ip addr add {self.net}.{number}/24 dev eth0; ip link set lo up; hostname {node}
            mount --bind {self.folder}/hosts /etc/hosts
            mount -t tmpfs -o mode=1777 tmpfs /dev/shm
            slurmd -D -N {node}; :"""  # bash stays the node's first process, and reaps
        apart = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child"]
        with (self.folder / f"{node}.out").open("ab") as out:
            self._nodes[node] = subprocess.Popen(
                ["unshare", *apart, "--mount-proc", "bash", "-c", inside],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        wait_for(f"{node}'s first process", lambda: self._pid(node), 10)
        wire = f"{self.bridge}-{number}"
        peer = ["peer", "name", "eth0", "netns", str(self._pid(node))]
        _ip("link", "add", wire, "type", "veth", *peer)
        _ip("link", "set", wire, "master", self.bridge, "up")

    @contextlib.contextmanager
    def slow_network(self, rate: str) -> Iterator[None]:
        """Let every node send no more than `rate` (as tc writes it: `8mbit`) within this block.

        Raises:
            OSError: If this kernel cannot.
        """
        limit = ["rate", rate, "burst", "64kb", "latency", "1s"]
        try:
            for node in self.names:
                self._discipline(node, "add", "tbf", *limit)
            yield
        finally:
            for node in self.names:
                with contextlib.suppress(OSError):
                    self._discipline(node, "del")

    def _discipline(self, node: str, verb: str, *words: str) -> None:
        command = self.on(node, "tc", "qdisc", verb, "dev", "eth0", "root", *words)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"tc: {done.stderr.strip()}")

    def wait_idle(self) -> None:
        """Wait until every node can take a job."""
        command = ["sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N"]
        wait_for("idle nodes", lambda: len(self.run(*command).split()) == len(self.names), 60)

    def stop(self) -> None:
        """End all that was started."""
        for node in list(self._nodes):
            self.crash(node)
        for name in ("slurmctld", "munged"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self.folder / f"{name}.pid").read_text()), signal.SIGKILL)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    def _pid(self, node: str) -> str:
        parent = self._nodes[node].pid
        return Path(f"/proc/{parent}/task/{parent}/children").read_text().strip()


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int = 2) -> Iterator[Cluster]:
    """Start a Slurm of `nodes` nodes n1, n2, ..., and end it."""
    pid = os.getpid()
    cluster = Cluster(
        folder=folder,
        names=tuple(f"n{number + 1}" for number in range(nodes)),
        net=f"10.{100 + pid // 250 % 100}.{pid % 250}",
        bridge=f"sl{pid % 100000}",
    )
    (folder / "state").mkdir(parents=True)
    try:
        _ip("link", "add", cluster.bridge, "type", "bridge")
        _ip("addr", "add", f"{cluster.net}.254/24", "dev", cluster.bridge)
        _ip("link", "set", cluster.bridge, "up")
        _write_settings(cluster)
        _start(cluster, "munged", "--force", *_munge_options(folder))
        _start(cluster, "slurmctld")
        for name in cluster.names:
            cluster.boot(name)
        cluster.wait_idle()
        yield cluster
    finally:
        cluster.stop()


def _munge_options(folder: Path) -> Sequence[str]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--key-file={key}", *(f"--{o}={folder}/munged.{end}" for o, end in files.items())]


def _write_settings(cluster: Cluster) -> None:
    folder, head = cluster.folder, socket.gethostname().partition(".")[0]
    addresses = {name: f"{cluster.net}.{n}" for n, name in enumerate(cluster.names, 1)}
    hosts = ["127.0.0.1 localhost", f"{cluster.net}.254 {head}"]
    hosts += [f"{address} {name}" for name, address in addresses.items()]
    (folder / "hosts").write_text("\n".join([*hosts, ""]))
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{head}({cluster.net}.254)",
        "SlurmctldPort": free_port(),
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        # a requeued job waits until its credential ends; 5 s is the shortest
        "AuthInfo": f"socket={folder}/munged.sock,cred_expire=5",
        "CredType": "cred/munge",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "%n.log",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0,"
        "sched_min_interval=0",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobRequeue": 1,
        "ReturnToService": 2,
        "KillWait": 20,
        "MinJobAge": 3600,
        "SlurmdTimeout": 10,
        "SlurmdParameters": "config_overrides",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines.append("NodeName=DEFAULT CPUs=8 RealMemory=4000")
    lines += [f"NodeName={name} NodeAddr={address}" for name, address in addresses.items()]
    lines.append("PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 State=UP")
    lines.append("PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP")
    (folder / "slurm.conf").write_text("\n".join([*lines, ""]))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # else it looks for a mount


def _start(cluster: Cluster, *command: str) -> None:
    """Start a daemon, which returns when it is up."""
    subprocess.run(command, env=cluster.environment, check=True, capture_output=True, timeout=30)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def start_sshd(cluster: Cluster) -> None:
    """Let every node in to every other by ssh, with a key that their ssh's settings name."""
    folder = cluster.folder
    if (folder / "ssh.conf").exists():  # it runs
        return
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / f"{name}.key")]
        subprocess.run(key, check=True, capture_output=True)
    (folder / "sshd.conf").write_text(
        f"HostKey {folder}/host.key\nAuthorizedKeysFile {folder}/user.key.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
    )
    (folder / "ssh.conf").write_text(
        f"Host *\n IdentityFile {folder}/user.key\n StrictHostKeyChecking no\n"
        f" UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    for node in cluster.names:
        for command in (
            ["mount", "--bind", f"{folder}/ssh.conf", "/etc/ssh/ssh_config"],
            ["/usr/sbin/sshd", "-f", f"{folder}/sshd.conf"],
        ):
            subprocess.run(cluster.on(node, *command), check=True, capture_output=True)
