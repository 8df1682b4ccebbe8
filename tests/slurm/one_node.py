"""A real SLURM on this machine: munged, slurmctld and slurmd with a configuration of their own in one folder.

    python tests/slurm/one_node.py start FOLDER      prints the variable under which clients find it
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
    """The daemons of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.conf = self.folder / "slurm.conf"
        self.variables = {"SLURM_CONF": str(self.conf)}

    def configure(self) -> None:
        """Write key and configuration. NoSlurm where something is missing."""
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
        """Start all daemons, and wait until the node takes jobs. NoSlurm where it does not."""
        self.configure()
        names = ("socket", "pid-file", "log-file", "seed-file", "key-file")
        places = ("munge.socket", "munge.pid", "munge.log", "munge.seed", "munge.key")
        options = [f"--{name}={self.folder / place}" for name, place in zip(names, places, strict=True)]
        self.daemon(["munged", "--force", *options])
        self.start_slurm()

    def start_slurm(self) -> None:
        """Start controller and node, anew after `kill_slurm`."""
        self.daemon(["slurmctld"])
        self.daemon(["slurmd"])
        end = time.monotonic() + 60
        while not self.said("sinfo", "--noheader", "--format=%T").startswith(("idle", "mixed", "allocated")):
            if time.monotonic() > end:
                raise NoSlurm(f"its node does not come up, see {self.folder}/slurmd.log")
            time.sleep(0.2)

    def daemon(self, command: Sequence[str]) -> None:
        done = subprocess.run(command, env=os.environ | self.variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoSlurm(f"{command[0]}: {done.stderr.strip()}")

    def said(self, *command: str) -> str:
        """What a client program prints."""
        done = subprocess.run(command, env=os.environ | self.variables, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a daemon, and wait for its end."""
        path = self.folder / f"{name}.pid"
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            pid = int(path.read_text())
            os.kill(pid, number)
            end = time.monotonic() + 20
            while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
                time.sleep(0.05)

    def stop(self) -> None:
        """Cancel what runs, and end all daemons."""
        if (self.folder / "slurmctld.pid").exists() and self.said("squeue", "--noheader"):
            self.said("scancel", f"--user={os.getuid()}")
            end = time.monotonic() + 30
            while self.said("squeue", "--noheader") and time.monotonic() < end:
                time.sleep(0.2)
        for name in ("slurmd", "slurmctld", "munge"):
            self.kill(name, signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    node = OneNode(Path(sys.argv[2]))
    if sys.argv[1] == "start":
        node.start()
        print(f"export SLURM_CONF={node.conf}")
    else:
        node.stop()
