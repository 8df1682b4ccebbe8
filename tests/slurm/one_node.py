"""A real SLURM of one node on this machine: munged, slurmctld and slurmd, configured in one folder.

    python tests/slurm/one_node.py start FOLDER      prints the variable by which clients find it
    python tests/slurm/one_node.py stop FOLDER

Needs root, Debian's slurm-wlm and munge; neither systemd nor control groups. Two partitions: jobs of `high` preempt
those of `low`, which SLURM queues again.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,requeue_delay=1
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=20
SlurmctldTimeout=10
KillWait=20
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class NoSlurm(Exception):
    """SLURM cannot be started here; the text says why."""


class OneNode:
    """The daemons that are configured in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.conf = self.folder / "slurm.conf"
        self.variables = {"SLURM_CONF": str(self.conf)}

    def configure(self) -> None:
        """Write the key and the configuration.

        Raises:
            NoSlurm: a program is missing, or the user is not root.
        """
        if missing := [name for name in NEEDED if not shutil.which(name)]:
            raise NoSlurm(f"{missing[0]} is not installed (apt-get install slurm-wlm munge)")
        if os.getuid() != 0:
            raise NoSlurm("only root can start it here")
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().partition(".")[0]
        self.conf.write_text(CONFIGURATION.format(host=host, folder=self.folder, ports=free_ports(2)))

    def start(self) -> None:
        """Start all daemons, and wait until the node takes jobs; NoSlurm if it does not."""
        self.configure()
        names = ("socket", "pid-file", "log-file", "seed-file", "key-file")
        files = ("munge.socket", "munge.pid", "munge.log", "munge.seed", "munge.key")
        options = [f"--{name}={self.folder / file}" for name, file in zip(names, files, strict=True)]
        self.start_daemon(["munged", "--force", *options])
        self.start_slurm()

    def start_slurm(self) -> None:
        """Start the controller and the node, also after they were killed."""
        self.start_daemon(["slurmctld"])
        self.start_daemon(["slurmd"])
        deadline = time.monotonic() + 60
        while not self.client("sinfo", "--noheader", "--format=%T").startswith(("idle", "mixed", "allocated")):
            if time.monotonic() > deadline:
                raise NoSlurm(f"its node does not come up, see {self.folder}/slurmd.log")
            time.sleep(0.2)

    def start_daemon(self, command: Sequence[str]) -> None:
        process = self.run(command)
        if process.returncode:
            raise NoSlurm(f"{command[0]}: {process.stderr.strip()}")

    def client(self, *command: str) -> str:
        """The output of a client program."""
        return self.run(command).stdout.strip()

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=os.environ | self.variables, capture_output=True, text=True, check=False)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a daemon, and wait until it has ended."""
        path = self.folder / f"{name}.pid"
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            pid = int(path.read_text())
            os.kill(pid, number)
            deadline = time.monotonic() + 20
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.05)

    def stop(self) -> None:
        """Cancel all jobs, and end all daemons."""
        if (self.folder / "slurmctld.pid").exists() and self.client("squeue", "--noheader"):
            self.client("scancel", f"--user={os.getuid()}")
            deadline = time.monotonic() + 30
            while self.client("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.2)
        for name in ("slurmd", "slurmctld", "munge"):
            self.kill(name, signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


if __name__ == "__main__":
    node = OneNode(Path(sys.argv[2]))
    if sys.argv[1] == "start":
        node.start()
        print(f"export SLURM_CONF={node.conf}")
    else:
        node.stop()
