"""The processes of one run: started by torchrun, or this one alone.

Work is split by rank. When work fails in one process it fails in all, so that none waits for one that has stopped.
Functions import torch themselves, so that importing this file does not take its seconds.

The processes watch each other: when one dies, the others end at once, with one line that names it (`watching_peers`).
"""

import gc
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from engine.printing import say
from engine.training.interruptions import Stopped

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")
# Ranks may reach a collective hours apart (a slow disk, a lock of others); `watching_peers` ends all when one dies.
MAX_WAIT = timedelta(days=2)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among those of the run."""

    rank: int = 0  # 0..size-1
    size: int = 1  # number of processes

    @property
    def is_rank0(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    @property
    def is_first_on_machine(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            from torch import distributed

            distributed.barrier()

    def from_rank0(self, value: Value) -> Value:
        """The `value` of rank 0, in every process."""
        values: list[Any] = [value]
        if self.size > 1:
            from torch import distributed

            distributed.broadcast_object_list(values, src=0)
        return values[0]

    def add_up(self, value: "Tensor") -> None:
        """Replace a tensor, of one shape in all processes, by the sum of all: exact where it holds integers."""
        if self.size > 1:
            from torch import distributed

            distributed.all_reduce(value)

    def gather_objects(self, value: Value) -> list[Value]:
        """The `value` of every process in the order of ranks; every process gets the whole list."""
        values: list[Any] = [value]
        if self.size > 1:
            from torch import distributed

            values = [None] * self.size
            distributed.all_gather_object(values, value)
        return values

    def gather_on_rank0(self, value: Value) -> list[Value]:
        """The `value` of every process in the order of ranks, in rank 0; an empty list in the others."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.gather_object(value, values if self.is_rank0 else None)
        return values if self.is_rank0 else []

    def gather_tensors(self, value: "Tensor") -> "list[Tensor]":
        """The tensors of all processes, of one shape and on devices of one kind, in the order of ranks."""
        if self.size == 1:
            return [value]
        from torch import distributed, empty_like

        values = [empty_like(value) for _ in range(self.size)]
        distributed.all_gather(values, value)
        return values

    def on_rank0(self, work: Callable[[], Value]) -> Value:
        """Run `work` in rank 0 and return its result in every process. If it fails, every process raises its error."""
        results: list[Any] = self.gather_results(lambda: work() if self.is_rank0 else None)
        return results[0]

    def on_all_ranks(self, work: Callable[[], Value]) -> Value:
        """Run `work` in every process and return this process's result. If one fails, every process raises."""
        own: list[Value] = []
        self.gather_results(lambda: own.append(work()))
        return own[0]

    def first_on_each_machine(self, work: Callable[[], Value]) -> Value:
        """As `on_all_ranks`, but the other processes of a machine begin once its first one has ended: they find what it
        left on disk."""
        is_first = self.is_first_on_machine
        own = self.on_all_ranks(lambda: [work()] if is_first else [])
        return self.on_all_ranks(lambda: own[0] if is_first else work())

    @contextmanager
    def held_by_rank0(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Hold a context, such as a lock, in rank 0 while every process runs a block."""
        with ExitStack() as held:
            self.on_rank0(lambda: held.enter_context(context))
            yield

    def gather_results(self, work: Callable[[], Value]) -> list[Value]:
        """Run `work` in every process and return the results of all, in the order of ranks, in every process.

        If it fails anywhere, every process raises: its own error, or else that of the lowest rank that failed. The
        error's `told_by` is the rank of the one process that should print it.
        """
        if self.size == 1:
            return [work()]
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # carried to every process and raised there
            error = raised
        outcomes = self.gather_objects((result, _portable(error)))
        failures = {rank: other for rank, (_, other) in enumerate(outcomes) if other is not None}
        if failures:
            failure = error or failures[min(failures)]
            if not hasattr(failure, "told_by"):  # else it was raised in all of them already, inside of `work`
                failure.told_by = min(failures)  # type: ignore[attr-defined]
            raise failure
        return [value for value, _ in outcomes]


def _portable(error: Exception | None) -> Exception | None:
    """The error as other processes get it: our own kinds as they are, of others, which may not pickle, the text."""
    if error is None or isinstance(error, ValueError | Stopped):
        return error
    return RuntimeError(f"{type(error).__name__} in another process: {error}")


def current_world() -> World:
    """The connected processes; this one alone where none are."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return World()
    return World(rank=distributed.get_rank(), size=distributed.get_world_size())


@contextmanager
def start_world(device: str) -> Iterator[World]:
    """Connect the processes that torchrun started (gloo on CPU, nccl too on CUDA) for the length of a block.

    Without torchrun's environment this process is alone. Processes that are connected already stay so afterwards. On
    CUDA each process uses the GPU of its local rank. When a process dies, the others end.
    """
    import torch
    from torch import distributed

    from engine.precision import keep_float32_exact

    chosen = torch.device(device)
    if chosen.type == "cuda":
        keep_float32_exact()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or distributed.is_initialized():
        if chosen.type == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)  # generators and contexts are those of the current device
        yield current_world()
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
        # Objects and flags travel by gloo between CPUs, so that exchanging them does not wait for the GPU.
        distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=MAX_WAIT, device_id=chosen)
    else:
        distributed.init_process_group("gloo", timeout=MAX_WAIT)
    world = current_world()
    try:
        with watching_peers(world.rank, world.gather_results) as peers:
            try:
                yield world
                _leave_together()
            except Exception as error:
                if hasattr(error, "told_by"):  # every process raises it and comes here
                    _leave_together()
                else:
                    peers.explain(error)
                raise
    finally:
        distributed.destroy_process_group()


def _leave_together() -> None:
    # Without both, gloo aborted at exit, after correct results, in 7 of 8 runs.
    from torch import distributed

    gc.collect()
    distributed.barrier()


CONNECT = 60.0  # seconds for all processes to connect to rank 0
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}  # together 50 seconds
PATIENCE = 10.0  # seconds to end in order after another process has failed, before this one is ended
ELECTION = 1.0  # seconds for which the process that prints holds its right to
LOOKS = 0.1  # seconds in which the signal that killed a process can be found
FAILED = 2  # exit code, as of any error


class Member(NamedTuple):
    """A process of the run. machine: what names it; processes of one machine see each other's /proc."""

    pid: int
    host: str
    machine: str
    port: int = 0  # of rank 0, where it listens
    token: str = ""  # of rank 0, which others show it


@dataclass(kw_only=True)
class Peers:
    """The other processes. connections: of rank 0 to all others, of the others to rank 0."""

    rank: int
    members: list[Member]
    connections: dict[int, socket.socket]
    failed: int | None = None  # a rank that left with an error of its own
    heard: threading.Event = field(default_factory=threading.Event)  # set when `failed` is
    leaving: bool = False

    def watch(self) -> None:
        """Listen to the connections until this process leaves or all others are done."""
        received = dict.fromkeys(self.connections, b"")
        with selectors.DefaultSelector() as ready:
            for rank, connection in self.connections.items():
                ready.register(connection, selectors.EVENT_READ, rank)
            while ready.get_map() and not self.leaving:
                for key, _ in ready.select():
                    new = _received(self.connections[key.data])
                    *words, received[key.data] = (received[key.data] + new).split(b"\n")
                    if self.leaving or not self._goes_on(key.data, words, closed=not new):
                        ready.unregister(key.fileobj)

    def _goes_on(self, rank: int, words: list[bytes], closed: bool) -> bool:
        """Act on a line from a process; returns whether more may follow."""
        for word in words:
            name, *numbers = word.decode().split()
            if name == "lost":
                self._end_with(*map(int, numbers))
            if name in ("left", "failed"):
                self._end_later(int(numbers[0]) if numbers else rank)
            if name in ("done", "failed"):
                return False
        if closed:
            is_here = self.members[rank].machine == self.members[self.rank].machine
            self._end_with(rank, signal_of(self.members[rank].pid) if is_here else 0)
        return True

    def _end_with(self, rank: int, killed_by: int) -> NoReturn:
        """End this process, because `rank` has died; one process of each machine says so."""
        self._tell_others(f"lost {rank} {killed_by}")
        # A block of the main thread may have silenced them.
        sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
        with socket.socket(socket.AF_UNIX) as right, suppress(OSError):
            right.bind(f"\0{self.members[0].token}")  # OSError where another process of this machine has it
            say(f"bench: error: {self._obituary(rank, killed_by)}", errors=True)
            time.sleep(ELECTION)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(FAILED)

    def _obituary(self, rank: int, killed_by: int) -> str:
        member = self.members[rank]
        how = f"was killed by signal {killed_by}" if killed_by else "died"
        why = ", as happens for lack of memory" if killed_by == signal.SIGKILL else ""
        return (
            f"process {rank} of {len(self.members)} (pid {member.pid}, host {member.host}) {how}{why}; "
            "run the same command again to go on (a pretraining with --resume)"
        )

    def _end_later(self, rank: int) -> None:
        """End this process, unless it does so itself, because `rank` has failed and told its error."""
        if self.heard.is_set():
            return
        self.failed = rank
        self.heard.set()
        self._tell_others(f"left {rank}")
        timer = threading.Timer(PATIENCE, os._exit, (FAILED,))
        timer.daemon = True
        timer.start()

    def _tell_others(self, word: str) -> None:
        if self.rank == 0:
            self._send(word)

    def _send(self, word: str) -> None:
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sendall(f"{word}\n".encode())

    def explain(self, error: Exception) -> None:
        """Mark an error that came of another process's: that one tells it. Where one died, this process ends here."""
        self.heard.wait(ELECTION)
        if self.failed is not None:
            error.told_by = self.failed  # type: ignore[attr-defined]

    def leave(self, well: bool) -> None:
        """Tell the others that this process ends, so that they do not take it for dead."""
        self.leaving = True
        self._send("done" if well else "failed")
        for connection in self.connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def close(self) -> None:
        """Give the connections up, in a forked process too, which would keep them open after this one has died."""
        for connection in self.connections.values():
            connection.close()


@contextmanager
def watching_peers(rank: int, agree: Callable[[Callable[[], Any]], list[Any]]) -> Iterator[Peers]:
    """Watch the other processes, and be watched, for the length of a block.

    Every process holds a connection to rank 0. The kernel closes it when its process ends, however that happens, and
    keeps it while a process is merely busy, in whatever library and for however long. A machine that is lost no longer
    answers the kernel's probes; that takes KEEP_ALIVE seconds. A thread waits at the connections, so that all this also
    works while the process hangs in a collective whose other side has gone, which NCCL would do until MAX_WAIT.

    Words on a connection are lines: "done" and "failed" of a process that leaves (its own error has been printed); from
    rank 0 also "lost R S", rank R was killed by signal S, and "left R", rank R has failed.

    agree: runs its argument in every process and returns the results of all, or raises in all (World.gather_results).
    """
    with _listener() if rank == 0 else socket.socket() as hub:
        members = agree(lambda: _member(hub if rank == 0 else None))
        connections: dict[int, socket.socket] = {}
        agree(lambda: connections.update(_accepted(hub, members) if rank == 0 else _connected(rank, members[0])))
    peers = Peers(rank=rank, members=members, connections=connections)
    os.register_at_fork(after_in_child=peers.close)
    thread = threading.Thread(target=peers.watch, name="peers", daemon=True)
    thread.start()
    well = False
    try:
        with _waiting_at_sigterm():
            yield peers
        well = True
    except Exception as error:
        well = hasattr(error, "told_by")  # all processes raise it, or another one tells it
        raise
    finally:
        peers.leave(well)
        thread.join()
        peers.close()


@contextmanager
def _waiting_at_sigterm() -> Iterator[None]:
    """torchrun sends SIGTERM to the others as soon as one has died: leave the thread a moment to say which."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminated(number: int, frame: object) -> None:
        time.sleep(ELECTION / 2)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _member(hub: socket.socket | None) -> Member:
    """This process; of rank 0 also where it listens."""
    host = socket.gethostname()
    machine = f"{host} {os.readlink('/proc/self/ns/pid')}"
    if hub is None:
        return Member(os.getpid(), host, machine)
    return Member(os.getpid(), host, machine, hub.getsockname()[1], secrets.token_hex(16))


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _accepted(hub: socket.socket, members: list[Member]) -> dict[int, socket.socket]:
    """Rank 0's connections to all others. RuntimeError where they do not come."""
    connections: dict[int, socket.socket] = {}
    end = time.monotonic() + CONNECT
    try:
        while len(connections) < len(members) - 1:
            hub.settimeout(max(0.001, end - time.monotonic()))
            connection, _ = hub.accept()
            token, _, rank = _greeting(connection).partition(b" ")
            if secrets.compare_digest(token, members[0].token.encode()):
                connections[int(rank)] = _kept_alive(connection)
            else:
                connection.close()  # no process of ours
    except OSError as error:
        lacking = sorted(set(range(1, len(members))) - connections.keys())
        raise RuntimeError(f"processes {lacking} did not connect to process 0 in {CONNECT:.0f} s ({error})") from error
    return connections


def _connected(rank: int, first: Member) -> dict[int, socket.socket]:
    connection = socket.create_connection((os.environ["MASTER_ADDR"], first.port), CONNECT)
    connection.sendall(f"{first.token} {rank}\n".encode())
    return {0: _kept_alive(connection)}


def _greeting(connection: socket.socket) -> bytes:
    """The first line of a new connection; a part of it if it is slow or long, as no process of ours is."""
    line = b""
    connection.settimeout(CONNECT / 10)
    with suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 100 and (part := connection.recv(1)):
            line += part
    return line


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _received(connection: socket.socket) -> bytes:
    """Received bytes; none if the connection was closed or lost."""
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def signal_of(pid: int) -> int:
    """The signal that killed a process of this machine, 0 where that cannot be known any more.

    The kernel keeps it until the parent has asked for it: fields 3 and 52 of /proc/PID/stat, state and exit_code
    (man 5 proc_pid_stat). The connection is closed a moment before the state changes.
    """
    end = time.monotonic() + LOOKS
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, *others = file.read().rpartition(") ")[2].split()
        except OSError:
            return 0
        if state in "ZX":
            return int(others[48]) & 0x7F
        time.sleep(0.001)
    return 0
