"""The processes of one run: those that torchrun started, or this one alone.

Work is split by rank. When work fails in one process it fails in all, so that none waits for one that has stopped.
Functions import torch themselves, because importing it takes seconds.

The processes watch each other: when one dies, the others exit at once and print one line that names it
(`watching_peers`).
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
# Ranks may reach a collective hours apart (a slow disk, another run's lock); `watching_peers` ends all when one dies.
MAX_WAIT = timedelta(days=2)


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run as seen by this one: its rank, their number, and collectives."""

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

    def all_reduce(self, value: "Tensor") -> None:
        """Replace a tensor by its sum over all processes, in which it has the same shape; exact for integers."""
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
        """In rank 0, the `value` of every process in the order of ranks; in the others, an empty list."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.gather_object(value, values if self.is_rank0 else None)
        return values if self.is_rank0 else []

    def gather_tensors(self, value: "Tensor") -> "list[Tensor]":
        """The tensors of all processes in the order of ranks; they need the same shape and kind of device."""
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
        """Like `on_all_ranks`, but the other processes of a machine begin after its first one, whose files they find on
        disk."""
        is_first = self.is_first_on_machine
        own = self.on_all_ranks(lambda: [work()] if is_first else [])
        return self.on_all_ranks(lambda: own[0] if is_first else work())

    @contextmanager
    def held_by_rank0(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Hold a context, such as a lock, in rank 0 while every process runs a block."""
        with ExitStack() as stack:
            self.on_rank0(lambda: stack.enter_context(context))
            yield

    def gather_results(self, work: Callable[[], Value]) -> list[Value]:
        """Run `work` in every process, and return all results in the order of ranks in every process.

        If it fails anywhere, every process raises: its own error, or else that of the lowest rank that failed. The
        error's `reported_by` is the rank of the one process that should print it.
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
            if not hasattr(failure, "reported_by"):  # else all have raised it already, inside `work`
                failure.reported_by = min(failures)  # type: ignore[attr-defined]
            raise failure
        return [value for value, _ in outcomes]


def _portable(error: Exception | None) -> Exception | None:
    """The error as it is sent to other processes: its text alone if it is of a kind that may not pickle."""
    if error is None or isinstance(error, ValueError | Stopped):
        return error
    return RuntimeError(f"{type(error).__name__} in another process: {error}")


def current_world() -> World:
    """The connected processes, or this one alone."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return World()
    return World(rank=distributed.get_rank(), size=distributed.get_world_size())


@contextmanager
def start_world(device: str) -> Iterator[World]:
    """Connect the processes that torchrun started for the length of a block (gloo on CPU; gloo and nccl on CUDA).

    Without torchrun's environment this process is alone. Processes that are already connected stay connected. On CUDA
    each process uses the GPU of its local rank. When a process dies, the others exit.
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
                if hasattr(error, "reported_by"):  # every process raises it and gets here
                    _leave_together()
                else:
                    peers.explain(error)
                raise
    finally:
        distributed.destroy_process_group()


def _leave_together() -> None:
    """Wait for all processes before they leave.

    Without both steps, gloo aborted at exit, after correct results, in 7 of 8 runs.
    """
    from torch import distributed

    gc.collect()
    distributed.barrier()


CONNECT_TIMEOUT = 60.0  # seconds for all processes to connect to rank 0
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}  # a lost machine is noticed after 50 seconds
EXIT_TIMEOUT = 10.0  # seconds that this process has to exit by itself after another one has failed
PRINT_CLAIM = 1.0  # seconds for which the one process of a machine that prints keeps the others from printing
SIGNAL_TIMEOUT = 0.1  # seconds to look for the signal that killed a process
EXIT_CODE = 2  # as for any error


class Member(NamedTuple):
    """A process of the run. Those with the same `machine` see each other's /proc."""

    pid: int
    host: str
    machine: str  # host and PID namespace
    port: int = 0  # rank 0: on which it listens
    token: str = ""  # rank 0: secret with which the others identify themselves


@dataclass(kw_only=True)
class Peers:
    """The other processes of a run, watched over sockets: rank 0 is connected to all others, these to rank 0 alone."""

    rank: int  # of this process
    members: list[Member]  # all processes, by rank
    connections: dict[int, socket.socket]  # by the rank of the other side
    failed: int | None = None  # a rank that left with an error of its own
    failure_known: threading.Event = field(default_factory=threading.Event)  # set together with `failed`
    leaving: bool = False

    def watch(self) -> None:
        """Listen on the connections until this process leaves or all others are done."""
        buffers = dict.fromkeys(self.connections, b"")
        with selectors.DefaultSelector() as ready:
            for rank, connection in self.connections.items():
                ready.register(connection, selectors.EVENT_READ, rank)
            while ready.get_map() and not self.leaving:
                for key, _ in ready.select():
                    data = _receive(self.connections[key.data])
                    *lines, buffers[key.data] = (buffers[key.data] + data).split(b"\n")
                    if self.leaving or not self._handle(key.data, lines, closed=not data):
                        ready.unregister(key.fileobj)

    def _handle(self, rank: int, lines: list[bytes], closed: bool) -> bool:
        """Act on lines from a process; returns whether more may follow."""
        for line in lines:
            name, *numbers = line.decode().split()
            if name == "lost":
                self._exit_after_death(*map(int, numbers))
            if name in ("left", "failed"):
                self._exit_soon(int(numbers[0]) if numbers else rank)
            if name in ("done", "failed"):
                return False
        if closed:
            same_machine = self.members[rank].machine == self.members[self.rank].machine
            self._exit_after_death(rank, signal_of(self.members[rank].pid) if same_machine else 0)
        return True

    def _exit_after_death(self, rank: int, killed_by: int) -> NoReturn:
        """Exit because `rank` has died; one process of each machine prints why."""
        self._tell_others(f"lost {rank} {killed_by}")
        # The main thread may have redirected both.
        sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
        with socket.socket(socket.AF_UNIX) as claim, suppress(OSError):
            claim.bind(f"\0{self.members[0].token}")  # OSError if another process of this machine was first
            say(f"bench: error: {self._death_message(rank, killed_by)}", errors=True)
            time.sleep(PRINT_CLAIM)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(EXIT_CODE)

    def _death_message(self, rank: int, killed_by: int) -> str:
        member = self.members[rank]
        how = f"was killed by signal {killed_by}" if killed_by else "died"
        why = ", as happens for lack of memory" if killed_by == signal.SIGKILL else ""
        return (
            f"process {rank} of {len(self.members)} (pid {member.pid}, host {member.host}) {how}{why}; "
            "run the same command again to continue (a pretraining with --resume)"
        )

    def _exit_soon(self, rank: int) -> None:
        """Exit after EXIT_TIMEOUT, unless this process ends before, because `rank` has failed and printed its error."""
        if self.failure_known.is_set():
            return
        self.failed = rank
        self.failure_known.set()
        self._tell_others(f"left {rank}")
        timer = threading.Timer(EXIT_TIMEOUT, os._exit, (EXIT_CODE,))
        timer.daemon = True
        timer.start()

    def _tell_others(self, line: str) -> None:
        if self.rank == 0:
            self._send(line)

    def _send(self, line: str) -> None:
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def explain(self, error: Exception) -> None:
        """Mark an error that follows from another process's failure as reported by that process.

        If another process has died, this one exits during the wait.
        """
        self.failure_known.wait(PRINT_CLAIM)
        if self.failed is not None:
            error.reported_by = self.failed  # type: ignore[attr-defined]

    def leave(self, well: bool) -> None:
        """Tell the others that this process ends on purpose, so that they do not consider it dead."""
        self.leaving = True
        self._send("done" if well else "failed")
        for connection in self.connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the watching thread

    def close(self) -> None:
        """Close the connections; in a forked child too, which would otherwise keep them open after this one's death."""
        for connection in self.connections.values():
            connection.close()


@contextmanager
def watching_peers(rank: int, agree: Callable[[Callable[[], Any]], list[Any]]) -> Iterator[Peers]:
    """Watch the other processes, and be watched, for the length of a block.

    Every process holds a connection to rank 0. The kernel closes it when the process ends, however that happens, and
    keeps it open while the process is merely busy, in any library and for any time. A machine that is lost stops
    answering the kernel's keep-alive probes, which is noticed after the times in KEEP_ALIVE. A thread waits on the
    connections, so all this also works while the process hangs in a collective whose other side is gone, as NCCL would
    until MAX_WAIT.

    Messages are lines: "done" or "failed" from a process that leaves (after a failure it has printed its own error);
    from rank 0 also "lost R S", rank R was killed by signal S, and "left R", rank R has failed.

    agree: runs its argument in every process and returns the results of all, or raises in all (World.gather_results).
    """
    with _listener() if rank == 0 else socket.socket() as hub:
        members = agree(lambda: _member(hub if rank == 0 else None))
        connections: dict[int, socket.socket] = {}

        def connect() -> None:
            connections.update(_accept_all(hub, members) if rank == 0 else _connect_to_rank0(rank, members[0]))

        agree(connect)
    peers = Peers(rank=rank, members=members, connections=connections)
    os.register_at_fork(after_in_child=peers.close)
    thread = threading.Thread(target=peers.watch, name="peers", daemon=True)
    thread.start()
    well = False
    try:
        with _delay_sigterm():
            yield peers
        well = True
    except Exception as error:
        well = hasattr(error, "reported_by")  # all processes raise it, or another one prints it
        raise
    finally:
        peers.leave(well)
        thread.join()
        peers.close()


@contextmanager
def _delay_sigterm() -> Iterator[None]:
    """Delay the effect of SIGTERM, which torchrun sends as soon as one process has died, so that the watching thread
    can print which one it was."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminated(number: int, frame: object) -> None:
        time.sleep(PRINT_CLAIM / 2)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _member(hub: socket.socket | None) -> Member:
    """This process; for rank 0, whose listening socket is `hub`, with port and token."""
    host = socket.gethostname()
    machine = f"{host} {os.readlink('/proc/self/ns/pid')}"
    if hub is None:
        return Member(os.getpid(), host, machine)
    return Member(os.getpid(), host, machine, hub.getsockname()[1], secrets.token_hex(16))


def _listener() -> socket.socket:
    """A socket on a free port, for IPv6 and IPv4 if the machine has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _accept_all(hub: socket.socket, members: list[Member]) -> dict[int, socket.socket]:
    """Rank 0's connections to all others. RuntimeError if some do not connect in time."""
    connections: dict[int, socket.socket] = {}
    end = time.monotonic() + CONNECT_TIMEOUT
    try:
        while len(connections) < len(members) - 1:
            hub.settimeout(max(0.001, end - time.monotonic()))
            connection, _ = hub.accept()
            token, _, rank = _read_greeting(connection).partition(b" ")
            if secrets.compare_digest(token, members[0].token.encode()):
                connections[int(rank)] = _keep_alive(connection)
            else:
                connection.close()  # not a process of this run
    except OSError as error:
        missing = sorted(set(range(1, len(members))) - connections.keys())
        raise RuntimeError(
            f"processes {missing} did not connect to process 0 in {CONNECT_TIMEOUT:.0f} s ({error})"
        ) from error
    return connections


def _connect_to_rank0(rank: int, first: Member) -> dict[int, socket.socket]:
    """The connection of another process to rank 0, which is the member `first`."""
    connection = socket.create_connection((os.environ["MASTER_ADDR"], first.port), CONNECT_TIMEOUT)
    connection.sendall(f"{first.token} {rank}\n".encode())
    return {0: _keep_alive(connection)}


def _read_greeting(connection: socket.socket) -> bytes:
    """The first line of a new connection, cut if it is slow or long, which those of this run are not."""
    line = b""
    connection.settimeout(CONNECT_TIMEOUT / 10)
    with suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 100 and (part := connection.recv(1)):
            line += part
    return line


def _keep_alive(connection: socket.socket) -> socket.socket:
    """Make reads wait without limit, and the kernel probe the other side as KEEP_ALIVE says."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _receive(connection: socket.socket) -> bytes:
    """The bytes that have arrived; empty if the connection was closed or lost."""
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def signal_of(pid: int) -> int:
    """The signal that killed a process of this machine, or 0 if that is no longer known.

    The kernel keeps it until the parent has reaped the process: fields 3 and 52 of /proc/PID/stat, state and exit_code
    (man 5 proc_pid_stat). The connection is closed a moment before the state changes.
    """
    end = time.monotonic() + SIGNAL_TIMEOUT
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, *later_fields = file.read().rpartition(") ")[2].split()
        except OSError:
            return 0
        if state in "ZX":
            return int(later_fields[48]) & 0x7F
        time.sleep(0.001)
    return 0
