"""The first program of a sandboxed child: split into two processes that give up their rights.

The judged process runs the model's program (`answer`). Its parent, the supervisor, runs one of our
own programs, which calls the judged one (`supervise`) and writes verdicts. It reads the expected
values after the split, so they are never in the judged process's memory.

All of it uses the standard library only and is sent as compiled code, so that the child reads no
file but the interpreter's. The steps: another user id where root can set it; user, mount, IPC and
network namespaces of its own, with a read-only file system and a small private working directory;
no capabilities; resource limits; no new privileges; Landlock against writing and reading elsewhere;
and a seccomp filter against new processes, signals, tracing and sockets. A step that the kernel
refuses is skipped, and its name is missing from the list that is reported.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PACKAGE = "dllm_bench.benchmarks.sandbox.child."
NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x08000000, 0x10000000, 0x40000000
CLONE_THREAD = 0x10000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MS_RDONLY, MS_NOSUID, MS_NODEV = 0x1, 0x2, 0x4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NODEV = 0x1, 0x4
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 38, 22, 1, 4
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, LANDLOCK_PATH = 444, 445, 446, 1
LANDLOCK_WRITE_FILE = 1 << 1
LANDLOCK_CHANGES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove, make
LANDLOCK_TRUNCATE = 1 << 14  # from the third version on
LANDLOCK_READS = (1 << 2) | (1 << 3)  # files and directories
DEVICES = ("/dev/null", "/dev/urandom")
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc/self", "/sys/devices", *DEVICES)
SIGKILL = 9
BEGUN = "begun"
"""Reported before anything is read that a judged program may have made."""
READING_S = 20
"""CPU seconds for reading and comparing all results of a program."""
FILES = 4096  # at most, in the working directory: an empty file takes memory of the kernel
DECIDING = ("architecture", "clone", "fcntl", "prlimit64", "prctl")
"""Names of the numbers that a filter needs besides those of the refused calls."""
OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a file may send any signal to anyone
SYS_CLONE3 = 435
X32_CALLS = 0x40000000  # first number of the second call table of x86_64
libc = ctypes.CDLL(None, use_errno=True)


def call(result: int) -> None:
    """Raise OSError for a failed libc call."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def limit_resources(limits: dict[str, int]) -> None:
    """Limit address space, CPU seconds, file size, processes and threads, open files; no core."""
    for name, value in limits.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        grace = 1 if name == "RLIMIT_CPU" else 0
        resource.setrlimit(which, (min(value, most), min(value + grace, most)))


def other_uid(packages: bool) -> None:
    """Turn root into `nobody`, if that user can still read what a program may import."""
    if os.geteuid() != 0:
        raise OSError(errno.EPERM, "not root")
    for path in (os.path.dirname(os.__file__), *([sys.prefix] if packages else [])):
        path = os.path.realpath(path)
        while path != "/":
            if not os.stat(path).st_mode & 0o001:
                raise OSError(errno.EACCES, path)
            path = os.path.dirname(path)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    call(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))  # else /proc/self, with the id maps, stays root's


def namespaces() -> None:
    """Enter new user, network, IPC and mount namespaces; the user keeps its id inside."""
    uid, gid = os.geteuid(), os.getegid()
    call(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS))
    maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def set_mount(path: bytes, attributes: int, clear: int, flags: int) -> None:
    """Set and clear attributes of the mount at `path` (mount_setattr(2))."""
    attr = (ctypes.c_uint64 * 4)(attributes, clear, 0, 0)
    call(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, attr, ctypes.sizeof(attr)))


def read_only_files(bytes_free: int, hidden: str) -> None:
    """Make the file system read-only and without devices, except a small working directory.

    hidden: a folder that is empty from now on.
    """
    here = os.getcwd().encode()
    call(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    devices = [device.encode() for device in DEVICES]
    for device in devices:
        call(libc.mount(device, device, None, MS_BIND, None))
    set_mount(b"/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, 0, AT_RECURSIVE)
    for device in devices:
        set_mount(device, 0, MOUNT_ATTR_NODEV, 0)
    if os.path.isdir(hidden):
        call(libc.mount(b"none", hidden.encode(), b"tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, None))
    options = f"size={bytes_free},nr_inodes={FILES},mode=0700".encode()
    call(libc.mount(b"tmpfs", here, b"tmpfs", MS_NOSUID | MS_NODEV, options))
    os.chdir(here)


def no_capabilities(machines: dict[str, Any]) -> None:
    """Empty the capability sets.

    What root has, or what the new user namespace gave, can then not be used or regained.
    """
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call(libc.syscall(machines[os.uname().machine]["capset"], header, (ctypes.c_uint32 * 6)()))


def no_new_privileges() -> None:
    """Stop set-uid programs from raising rights; an unprivileged seccomp filter requires this."""
    call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def readable(packages: bool) -> list[str]:
    """Return the paths a program may read: files of the system and of Python."""
    own = [os.path.dirname(os.path.realpath(os.__file__)), os.path.realpath(sys.executable)]
    if packages:
        own += [sys.prefix, sys.base_prefix]
    return [path for path in (*SYSTEM_FOLDERS, *own) if os.path.exists(path)]


def landlock(packages: bool) -> None:
    """Allow writing in the working directory, and reading there and of Python and the system alone.

    Below /dev only `DEVICES` can be read, since /dev/shm may hold data of others.

    It also keeps the program from tracing processes outside.
    """
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    call(version)
    changes = LANDLOCK_CHANGES | (LANDLOCK_TRUNCATE if version >= 3 else 0)
    everything = changes | LANDLOCK_READS
    handled = ctypes.c_uint64(everything)
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    call(rules)
    allow(rules, ".", everything)
    allow(rules, os.devnull, LANDLOCK_WRITE_FILE | (1 << 2))
    for path in readable(packages):
        allow(rules, path, LANDLOCK_READS if os.path.isdir(path) else 1 << 2)
    call(libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def allow(rules: int, path: str, rights: int) -> None:
    """Add a rule to the Landlock ruleset: these rights below `path`."""
    below = os.open(path, os.O_PATH)
    rule = rights.to_bytes(8, sys.byteorder) + below.to_bytes(4, sys.byteorder)
    call(libc.syscall(LANDLOCK_ADD, rules, LANDLOCK_PATH, rule, 0))
    os.close(below)


def seccomp(may_kill: bool, machines: dict[str, Any]) -> None:
    """Refuse new processes, sockets, signals to others, tracing, mounts and uncounted memory.

    Nor may it change the scheduling or the memory of others, leave its group, or outlive its
    parent. Threads may start. Uncounted is memory that no resource limit covers. machines: see
    `system_calls.yaml`.
    """
    calls = machines[os.uname().machine]
    arch, clone, fcntl, prlimit, prctl = map(calls.__getitem__, DECIDING)
    refused = [n for name, n in calls["refused"].items() if name != "kill" or not may_kill]
    load, jump_eq, jump_ge, jump_set, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x00050000
    first, second = (load, 0, 0, 16), (load, 0, 0, 24)  # arguments
    tail = [(ret, 0, 0, allow), (ret, 0, 0, error | errno.EPERM), (ret, 0, 0, error | errno.ENOSYS)]
    body = [(load, 0, 0, 4), (jump_eq, 1, 0, arch), (ret, 0, 0, kill), (load, 0, 0, 0)]
    body += [(jump_ge, -2, 0, X32_CALLS)]
    body += [(jump_eq, 0, 2, clone), first, (jump_set, -1, -2, CLONE_THREAD)]
    body += [(jump_eq, 0, 2, prlimit), first, (jump_eq, -1, -2, 0)]  # the program's own limits
    body += [(jump_eq, 0, 2, prctl), first, (jump_eq, -2, -1, PR_SET_PDEATHSIG)]
    body += [(jump_eq, 0, 2 + len(OWNERS), fcntl), second]
    body += [*((jump_eq, -2, 0, kind) for kind in OWNERS), (ret, 0, 0, allow)]
    body += [(jump_eq, -3, 0, SYS_CLONE3)] + [(jump_eq, -2, 0, number) for number in refused]
    targets = {-1: 0, -2: 1, -3: 2}  # negative jumps: index into `tail`
    code = []
    for i, (op, yes, no, k) in enumerate(body):
        yes, no = (len(body) - i - 1 + targets[j] if j < 0 else j for j in (yes, no))
        code.append((op, yes, no, k))
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *one) for one in code + tail)
    )

    filter_ = struct.pack("HP", len(code + tail), ctypes.addressof(program))  # a sock_fprog
    call(libc.prctl(PR_SET_SECCOMP, 2, filter_, 0, 0))


def attempt(held: list[str], step: Callable[..., None], *args: object) -> None:
    """Take a step of the isolation, if the kernel allows it, and note its name."""
    try:
        step(*args)
        held.append(step.__name__)
    except (OSError, AttributeError, KeyError):
        pass


def enclose(job: dict[str, Any]) -> list[str]:
    """Take the isolation steps that both processes share; return the names of those taken."""
    held: list[str] = []
    attempt(held, other_uid, job["packages"])
    attempt(held, namespaces)
    if "namespaces" in held:
        attempt(held, read_only_files, job["limits"]["RLIMIT_FSIZE"], job["hidden"])
    return held


def restrict(job: dict[str, Any], held: list[str], supervisor: bool) -> None:
    """Take the steps of isolation that each process applies to itself; add the names of those taken
    to `held`."""
    attempt(held, no_capabilities, job["system_calls"])
    limit_resources(job["limits"])
    attempt(held, no_new_privileges)
    attempt(held, landlock, job["packages"])
    if hasattr(libc, "prctl"):
        # after the change of rights, at which the kernel forgets the signal
        libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0 if supervisor else 1, 0, 0, 0)
    attempt(held, seccomp, supervisor, job["system_calls"])


def give_input(text: bytes) -> None:
    """Make a file without a name that holds the text the standard input."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("input")
    else:
        file = os.open("input", os.O_RDWR | os.O_CREAT)
        os.unlink("input")
    with open(file, "wb", closefd=False) as whole:
        whole.write(text)
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def silence(*outputs: int) -> None:
    """Discard everything that is written to these file descriptors."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nowhere, output)
    os.close(nowhere)


def keep_open(*files: int) -> None:
    """Close every other file but standard input, output and error."""
    for low, high in zip((2, *sorted(files)), (*sorted(files), 1 << 16), strict=True):
        os.closerange(low + 1, high)


def add_modules(modules: dict[str, Any]) -> None:
    """Make our own modules importable by their names."""
    for name, code in modules.items():
        module = sys.modules[name] = type(sys)(name)
        exec(code, module.__dict__)


def run_answer(job: dict[str, Any], requests: int, results: int, held: list[str]) -> None:
    """Run the judged process: drop the rights, run the program, leave."""
    keep_open(requests, results)
    give_input(job["stdin"])
    silence(*((1, 2) if job["silent"] else (2,)))
    restrict(job, held, supervisor=False)
    answer = sys.modules[PACKAGE + "answer"]
    answer.send(results, tuple(held))
    answer.main(job, requests, results)


def run_supervisor(order: dict[str, Any], answer: Any, channel: int) -> None:
    """Run the supervisor: run the ordered program and report its words, then how it all ended."""

    def report(*words: object) -> None:
        line = "\t".join(
            str(word).replace("\t", " ").replace("\n", " ") for word in (order["nonce"], *words)
        )
        os.write(channel, line.encode(errors="replace") + b"\n")

    begun = False

    def begin() -> None:
        nonlocal begun
        begun = True
        report(BEGUN)
        limit_reading()

    supervise = sys.modules[PACKAGE + "supervise"]
    answer.begin = begin
    try:
        report("held", *answer.held())
        ended = sys.modules[order["program"]].main(order["payload"], report, answer)
    except supervise.AnswerEnded as error:
        ended = error.args if begun else ("judge_error", f"it does not start: {error.args[1]}")
    except Exception as error:
        kind = "failed" if begun else "judge_error"
        ended = (kind, f"{type(error).__name__}: {error}"[:200])
    answer.stop()
    report("end", *ended)


def limit_reading() -> None:
    """Bound the CPU seconds that this process spends on what comes from the judged one.

    The kernel ends it then: one comparison of hostile values may take for ever inside of Python,
    where no exception reaches it. The parent counts such an end as a wrong answer.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + READING_S
    if until < resource.getrlimit(resource.RLIMIT_CPU)[0]:  # finite, see `restrict`
        limit_resources({"RLIMIT_CPU": until})


def open_schedule(pid: int) -> int:
    """Return the file that says how long a process waited for a processor, or -1."""
    try:
        return os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)
    except OSError:
        return -1


def main(job: dict[str, Any], receive: Callable[[], dict[str, Any]]) -> None:
    """Split into supervisor and judged process; `receive` reads what only the supervisor gets."""
    channel = job["channel"]
    if channel < 0:  # in a container, verdicts go out through the standard error
        channel = os.dup(2)
        os.dup2(1, 2)
    held = enclose(job)
    add_modules(job["modules"])
    from_supervisor, requests = os.pipe()
    results, to_supervisor = os.pipe()
    if hasattr(libc, "prctl"):  # the judged process may run before the supervisor goes on
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run_answer(job, from_supervisor, to_supervisor, held)
            status = 0
        finally:
            os._exit(status)
    os.close(from_supervisor)
    os.close(to_supervisor)
    schedule = open_schedule(pid)  # before Landlock hides it
    order = receive()
    if job["silent"]:
        silence(1, 2)
    add_modules(order["modules"])
    restrict(job, [], supervisor=True)
    times = {"cpu_s": job["limits"]["RLIMIT_CPU"], "wall_s": job["wall_s"]}
    supervise = sys.modules[PACKAGE + "supervise"]
    run_supervisor(order, supervise.JudgedProcess(pid, requests, results, schedule, times), channel)
    os._exit(0)
