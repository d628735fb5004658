# SPDX-License-Identifier: LGPL-3.0-or-later
"""What must be known of Open MPI and MPICH to start a program under either.

Inputs: the user's command. Outputs: the command line and environment that start it with the
profiling library, unbound to cores and leaving no files behind; and, when it failed, the
reason in one line. Pure but for a look at the program's libraries, and for asking a starter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence

from dovetail.core import programs
from dovetail.host import borrowed_python
from dovetail.host.memory import out_of_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STARTERS = {"mpirun": "", "mpiexec": "", "orterun": "openmpi", "prterun": "openmpi"}
STARTERS.update({"mpirun.openmpi": "openmpi", "mpiexec.openmpi": "openmpi"})
STARTERS.update({"mpirun.mpich": "mpich", "mpiexec.mpich": "mpich", "mpiexec.hydra": "mpich"})
"""Programs that start MPI programs, and the MPI that they belong to if the name tells."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)
# Debian alone calls MPICH's libmpich.so.12; its makers and Intel say libmpi, some vendors libmpi_x.
_LIBRARIES = {"openmpi": r"\blibmpi\.so\.40\b", "mpich": r"\blibmpi(ch|_\w+)?\.so\.12\b"}
_SAY = {"openmpi": r"Open MPI|OpenRTE|PRRTE", "mpich": r"HYDRA|MPICH|Intel\(R\) MPI"}
_ENDS_ALL = (b"the job has been aborted", b"the job to be terminated", b"MPI_ABORT was invoked")
_PATIENCE = 20.0  # seconds for a program to say what it is
_LOADING = 300.0  # seconds for ldd to load one, from a file system that a large job keeps busy


def which(program: str, path: str, case: str = "") -> str:
    """The program's file by the search path `path`, or from `case`; empty if there is none."""
    for directory in [case] if "/" in program else path.split(":"):
        file = os.path.join(directory, program)
        if os.path.isfile(file) and os.access(file, os.X_OK):
            return file
    return ""


def flavour(
    program: str, path: str, case: str = "", environment: Mapping[str, str] | None = None
) -> str:
    """`openmpi` or `mpich`: the one that a starter belongs to, or whose library the program loads.

    `case` is where the program is started, `environment` what it gets, by default our own.
    Empty if neither can be told, as for scripts; takes as long as loading the program.
    """
    file = which(program, path, case)
    if os.path.basename(program) in STARTERS:
        real = os.path.basename(os.path.realpath(file))
        told = STARTERS[os.path.basename(program)] or STARTERS.get(real, "")
        return told or (of_starter(file, environment) if file else "")
    return linked(file, environment) if file else ""


def clues(
    program: str, case: Sequence[str], environment: Iterable[tuple[str, str]]
) -> tuple[str, ...]:
    """What `flavour` goes by: two simulations in which this is the same have the same MPI.

    `case` is the case and what prepares it, which tell what a path in it leads to.
    """
    names = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
    told = [f"{name}={value}" for name, value in environment if name in names]
    within = "/" in program and not os.path.isabs(program)
    return (program, *sorted(told), *(case if within else ()))


def of_starter(file: str, environment: Mapping[str, str] | None = None) -> str:
    """The MPI of a starter whose name does not tell, by its own words; empty if they do not."""
    said = _said([file, "--version"], environment)
    return next((mpi for mpi, words in _SAY.items() if re.search(words, said)), "")


def version(path: str) -> str:
    """What the `mpirun` of the search path `path` says of its version; empty if there is none."""
    file = which("mpirun", path)
    lines = _said([file, "--version"], None).splitlines() if file else []
    return next((" ".join(line.split()) for line in lines if re.search(r"\d", line)), "")


def linked(file: str, environment: Mapping[str, str] | None = None) -> str:
    """The MPI whose library a program loads, empty for none; as slow as loading it.

    `environment` is what the program gets, by default our own. Empty too in an image that has no
    ldd.
    """
    listing = _said(["ldd", file], environment, _LOADING)
    return next((mpi for mpi, library in _LIBRARIES.items() if re.search(library, listing)), "")


def _said(
    words: list[str], environment: Mapping[str, str] | None, patience: float = _PATIENCE
) -> str:
    """What a program prints within `patience` seconds; empty where it cannot be started."""
    output, output_end = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output_end, 1),
        (os.POSIX_SPAWN_DUP2, output_end, 2),
    ]
    try:
        pid = os.posix_spawnp(words[0], words, environment or os.environ, file_actions=actions)
    except OSError:
        os.close(output)
        return ""
    finally:
        os.close(output_end)
    said, chunk, limit = b"", b"more", time.monotonic() + patience
    while chunk and select.select([output], [], [], max(0.0, limit - time.monotonic()))[0]:
        chunk = os.read(output, 1 << 16)
        said += chunk
    if chunk:
        os.kill(pid, signal.SIGKILL)
    os.close(output)
    os.waitpid(pid, 0)
    return said.decode(errors="replace")


def ends_all(output: bytes | bytearray) -> bool:
    """Whether Open MPI's starter has said that it ends the program, as a rank has failed."""
    return any(words in output for words in _ENDS_ALL)


def may_hang(program: str) -> bool:
    """Whether a program, by its file, is a starter of Open MPI itself, and not a script."""
    return os.path.basename(program) in ("orterun", "prterun")


def command_line(
    command: Sequence[str], ranks: int, path: str, mpi: str, place: Sequence[str] = ()
) -> list[str]:
    """The words that start the command on `ranks` ranks under `mpi` (empty: any there is).

    `place` are the words before each rank that put it into its pod. A command that begins with a
    starter such as `mpirun` is taken as it is, and so is one of one rank where there is no starter.
    Of several versions that one is the program's whose `mpirun` comes first, as by hand, even if
    another one alone has a starter of a name of its own.
    """
    if programs.is_starter(command[0]):  # of whatever name, as a site's `mpirun.lsf`
        return list(command)
    names = {"openmpi": ["mpirun.openmpi"], "mpich": ["mpiexec.mpich", "mpiexec.hydra"]}
    plain = [name for name in ("mpirun", "mpiexec") if which(name, path)]
    own = [name for name in names.get(mpi, ()) if which(name, path)]
    theirs = [name for name in plain if own and flavour(name, path) == mpi]
    starter = next(iter([*theirs, *own, *plain]), "" if ranks == 1 else "mpirun")
    if not starter:
        return list(command)
    return [starter, "-np", str(ranks), *place, *command]


ALONE = {"OMPI_MCA_ess_singleton_isolated": "1"}
"""The environment of a program that is started without a starter: Open MPI then starts no daemon,
which only programs need that have MPI start others."""

HERE = {
    "OMPI_MCA_ras": "^slurm,tm,lsf,gridengine,alps",
    "PRTE_MCA_ras": "^slurm,pbs,lsf,gridengine,flux",  # the same since Open MPI 5
    "HYDRA_RMK": "user",
}
"""The environment of starters whose ranks are to be on this machine: within a job of a batch system
they would start them on the nodes that it has, by its own means."""

UNBOUND = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # the same since Open MPI 5
    "HYDRA_BINDING": "none",
}
"""The environment of starters that bind no rank to cores. By themselves they believe that they own
the machine, and bind to its first cores, whichever of them they may use."""

_TASK = ("FLUX_JOB_ID", "PMI_")
"""How the variables begin that make a program a rank of the job of which a run is a task. Beside
the first, Open MPI's starter crashes; of the others one is the number of a file that it would need.
"""


def here(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of what runs on this machine, and is no part of the job that we are in."""
    return {**HERE, **{name: base[name] for name in base if not name.startswith(_TASK)}}


def environment(base: Mapping[str, str], directory: str, temporary: str) -> dict[str, str]:
    """The environment of the command: `base` with what profiling and packing need.

    `directory` (in shared memory) takes the rank pages and the MPI's own shared segments,
    `temporary` its other files, so that both vanish with their directories whatever happens.
    """
    extra = {
        "DOVETAIL_DIR": directory,
        "TMPDIR": temporary,
        # Without yielding, a rank that waits never calls what the doorbell hooks.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # the same since Open MPI 5
        "OMPI_MCA_btl_vader_backing_directory": directory,
        "UCX_POSIX_DIR": directory,
        **UNBOUND,
    }
    if os.getuid() == 0:
        extra.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return {**base, **extra}


def host_files(hosts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """For each MPI, the file that puts consecutive ranks on their rank groups' hosts.

    `hosts` has an address and a number of ranks per rank group; the first one is ourselves.
    """
    own, name = hosts[0]["address"], socket.gethostname()
    groups = [(host["address"], int(host["ranks"])) for host in hosts]
    lines = [
        (name if address == own else address) + "\n" for address, n in groups for _ in range(n)
    ]
    parts = [("localhost" if address == own else address) + f":{n}\n" for address, n in groups]
    return {"openmpi": "".join(lines), "mpich": "".join(parts)}


def within(hosts: Sequence[Mapping[str, Any]], path: str) -> dict[str, str]:
    """What keeps an MPI in the network of these hosts, and on one address of the first, ourselves.

    Even one host needs it: if that has loopback alone, Open MPI by itself would start nothing. Nor
    would it where nothing on the search path is like ssh, as in an image, though it is not called.
    """
    network = common_network([host["address"] for host in hosts])
    names = ("OMPI_MCA_oob_tcp_if_include", "OMPI_MCA_btl_tcp_if_include")
    agent = {} if which("ssh", path) or which("rsh", path) else {"OMPI_MCA_plm_rsh_agent": "sh"}
    told = {**dict.fromkeys(names, network), **listening(hosts[0]["address"])} if network else {}
    if network:  # IPv6 addresses of the same interfaces are not for it
        told.update(OMPI_MCA_oob_tcp_disable_ipv6_family="1", OMPI_MCA_btl_tcp_disable_family="6")
    return {**told, **agent}


def listening(address: str) -> dict[str, str]:
    """What has the starters, daemons and ranks on the host with this address listen on it alone.

    The first variable is for the profiling library: they cannot be told themselves.
    """
    device = interface(address)
    if not device:  # it is not what they tell others, or they would have to know us by name
        return {}
    # Of all the loopback addresses the interface has just one, and they tell that.
    return {"DOVETAIL_LISTEN": "127.0.0.1" if device == "lo" else address, "HYDRA_IFACE": device}


def across(hosts: Sequence[Mapping[str, Any]], directory: str, script: str) -> dict[str, str]:
    """What the starters of both MPIs need in their environment to start ranks in other pods.

    `directory` has the files `hosts.openmpi` and `hosts.mpich`, `script` is `rsh_agent.py`.
    """
    words = [*borrowed_python.own(), "-I", "-S", script]
    python = " ".join(words)
    extra = {
        "DOVETAIL_GROUP": "0",
        "DOVETAIL_GROUPS": ",".join(str(host["ranks"]) for host in hosts),
        "OMPI_MCA_orte_fork_agent": f"{python} place",
        "PRTE_MCA_odls_base_exec_agent": f"{python} place",
        # It goes by process ids, which mean nothing in another pod.
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        "OMPI_MCA_smsc": "^cma",
    }
    addresses = [host["address"] for host in hosts]
    if len(set(addresses)) > 1:
        extra.update(
            # Open MPI 5 has other names, and its daemons in other pods do not report back all the
            # same: it ends and says so, where else it would start all ranks in the first pod.
            OMPI_MCA_plm="rsh",
            PRTE_MCA_plm="ssh",
            OMPI_MCA_plm_rsh_agent=f"{python} spawn",
            OMPI_MCA_plm_rsh_no_tree_spawn="1",
            OMPI_MCA_rmaps="seq",
            PRTE_MCA_rmaps_default_mapping_policy="seq:oversubscribe",
            OMPI_MCA_orte_default_hostfile=f"{directory}/hosts.openmpi",
            PRTE_MCA_prte_default_hostfile=f"{directory}/hosts.openmpi",
            PRTE_MCA_plm_ssh_agent=f"{python} spawn",
            PRTE_MCA_plm_ssh_no_tree_spawn="1",
            HYDRA_LAUNCHER="rsh",  # for ssh it puts an option of its own first
            HYDRA_LAUNCHER_EXEC=words[0],
            HYDRA_LAUNCHER_EXTRA_ARGS=" ".join([*words[1:], "spawn"]),
            HYDRA_HOST_FILE=f"{directory}/hosts.mpich",
        )
    return extra


def common_network(addresses: Sequence[str]) -> str:
    """The smallest IPv4 network that all these addresses are in; empty if one is none of those.

    Each node then has an interface in it, whatever that is called there.
    """
    try:
        numbers = [int.from_bytes(socket.inet_aton(address), "big") for address in addresses]
    except OSError:
        return ""
    if all(number >> 24 == 127 for number in numbers):
        return "127.0.0.0/8"  # the interface has one address of all those it answers to
    bits = max((number ^ numbers[0]).bit_length() for number in numbers)
    start = numbers[0] >> bits << bits
    return f"{socket.inet_ntoa(start.to_bytes(4, 'big'))}/{32 - bits}"


def interface(address: str) -> str:
    """The network interface that has this IPv4 address; empty if there is none."""
    if address.startswith("127."):
        return "lo"
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        wanted = socket.inet_aton(address)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode())
                if fcntl.ioctl(query.fileno(), _GET_ADDRESS, asked)[20:24] == wanted:
                    return name
    return ""


def preload(base: Mapping[str, str], library: str) -> dict[str, str]:
    """`base` with the profiling library loaded into every program; empty for none.

    The library comes before what the user preloads, whose wrappers of MPI it then calls. A program
    built with AddressSanitizer does not start where anything comes before the sanitizer's own
    library, unless told not to look; ours takes nothing from it that it does not hand on.
    """
    if not library:
        return dict(base)
    words = filter(None, (library, base.get("LD_PRELOAD", "")))
    environment = {**base, "LD_PRELOAD": ":".join(words)}
    options = base.get("ASAN_OPTIONS", "")
    if "verify_asan_link_order" not in options:
        environment["ASAN_OPTIONS"] = ":".join(filter(None, (options, "verify_asan_link_order=0")))
    return environment


_PREFIX = r"^(?:\[[\w.,-]+\]\s?)?"  # OpenFOAM and many others put the rank in front
_LOUD = re.compile(r"error|fatal|fail|abort|exception|cannot|not found|no such|killed", re.I)
# What the two starters themselves say about a failure, between lines of dashes or equal signs.
_STARTER_SAYS = re.compile(r"^(-{60,})\n(?:.*\n)*?\1\n|^(={60,})\n(?:=.*\n)*\2\n", re.M)
# What they and the MPI libraries say in a line of their own when a rank ends all, which tells less
# than the program, if that has said anything.
_MPI_SAYS = re.compile(r"ORTE_ERROR_LOG: |PRTE ERROR: |application called MPI_Abort\(")
# Open MPI about a call that failed; what it says after that is no reason.
_CALL_FAILED = re.compile(
    r"\*\*\* An error occurred in (MPI_\w+)[\s\S]{,400}?\*\*\* (MPI_ERR_\w+: .+)"
)


def explain(
    code: int,
    output: str,
    ranks_by_pid: Mapping[int, int],
    aborted: Sequence[int] = (),
    starved: str = "",
) -> str:
    """Why a command failed, in one line.

    `code` is its exit code, 128 more than the signal that ended it; `output` the end of what
    it printed; `ranks_by_pid` the ranks that are known; `aborted` those that called MPI_Abort
    by their own pages: the starters do not always say so. `starved` is not empty if the kernel
    has killed processes for want of memory: why, as `memory.KernelKills` has it.
    """
    missing = re.search(
        r"(?:find the specified|access\san) executable[\s\S]*?Executable: +(\S+)", output
    )
    missing = missing or re.search(r"execvp error on file (\S+)", output)
    if missing:
        return f"program {missing[1]} not found"
    if "mpirun does not support recursive calls" in output:
        below = "mpirun was started by a script below another mpirun"
        return f"{below}; a script with a name such as mpirun.all is started without one"
    who = ""
    killed = re.search(r"rank (\d+) with PID \d+ .*exited on\s+signal (\d+)", output)
    told = re.search(r"MPI_ABORT was invoked on rank (\d+) [\s\S]{,300}?rrorcode:? (\d+)", output)
    exited = re.search(r"Process name: \[\S+,(\d+)\]\s+Exit code:\s+(\d+)", output)
    improper = re.search(r"rank (\d+) with PID \d+ on\s+node \S+ exiting\s+improperly", output)
    hydra = re.search(r"= +PID (\d+) RUNNING AT .*\n= +EXIT CODE: (\d+)", output)
    if killed:
        return _killed(f"rank {killed[1]}", killed[2], starved)
    if improper and not (told or exited or aborted):  # the starter's own exit code is 1
        who = f"rank {improper[1]} ended without MPI_Finalize, or before MPI_Init"
        return f"{who}: {said}" if (said := complaint(output)) else who
    found = told or exited
    if found:
        who, code = f"rank {found[1]}: ", int(found[2])
    elif aborted:
        who = f"rank {aborted[0]}: "
    elif hydra:
        rank = ranks_by_pid.get(int(hydra[1]))
        who = "a rank" if rank is None else f"rank {rank}"
        ended_by = re.search(r"EXIT STRING: .*\(signal (\d+)\)", output)
        if ended_by and ended_by[1] == "9" and len(ranks_by_pid) != 1:
            return _killed("a rank", "9", starved)  # as are its peers, one of which may be named
        if ended_by:
            return _killed(who, ended_by[1], starved)
        who, code = f"{who}: ", int(hydra[2])
    if code == 137 and starved:
        return _killed(who.removesuffix(": ") or "it", "9", starved)
    signalled = by_signal(code) and not who
    ended = f"killed by signal {code - 128}" if signalled else f"exit code {code}"
    said = complaint(output)
    return f"{who}{ended}" + (f": {said}" if said else "")


def by_signal(code: int) -> bool:
    """Whether an exit code is that of a signal, 128 more than it; 255 is what exit(-1) makes."""
    return 128 < code < 128 + signal.NSIG


def _killed(who: str, number: str, starved: str) -> str:
    if number == "9" and starved:
        return out_of_memory(who, starved)
    return f"{who} killed by signal {number}"


def complaint(output: str) -> str:
    """The line of a program's output that looks most like the error; the last one if none does."""
    said = _STARTER_SAYS.sub("", output[-65536:]).replace("\0", "")  # Open MPI 5 ends with one
    lines = [line.strip() for line in said.splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]  # and no rows of asterisks
    own = [line for line in lines if not _MPI_SAYS.search(line)]
    if not own and any("show_help.c" in line for line in lines):
        return "Open MPI lost its message that says why"  # while it put those of ranks together
    lines = [re.sub(_PREFIX, "", line) for line in own or lines]
    for index, line in enumerate(lines):
        if "FOAM FATAL" in line:
            return _short(" ".join(filter(None, lines[index : index + 3])).lstrip("-> "))
    if failed := _CALL_FAILED.search(output[-65536:]):
        return _short(f"{failed[1]}: {failed[2]}")
    loud = [line for line in lines if _LOUD.search(line)]
    return _short((loud or lines or [""])[-1])


def _short(line: str) -> str:
    return line if len(line) <= 200 else line[:197] + "..."
