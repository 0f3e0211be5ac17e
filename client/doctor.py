"""The command doctor: what this machine lacks for ctxd(8), and how to get it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from client.declaring import LISTING, Arguments, command
from client.exits import FAILED, OK, Failure
from client.files import find_program, first_line, pairs, read_file
from client.networks import ANSWER_SECONDS, Finding, check_networks, judge
from client.nodes import check_nodes
from client.output import Part, decode, show
from client.root import DEFAULT_ROOT, Root, start_hint, user_directory
from client.types import Iterator, Sequence
from client.words import CONTROLLERS

NEW_PYTHON = "install python 3.11 or newer: apt-get install python3"
DELEGATE = (
    "systemctl --user start ctxd, or systemd-run --user --scope -p Delegate=yes ctxd, or see "
    "ROOTLESS in ctxd(8)"
)
NEW_KERNEL = "install Linux 5.14 or newer: apt-get install linux-image-amd64; reboot"
V2_ONLY = (
    "boot with cgroup v2 only: add systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all to "
    "GRUB_CMDLINE_LINUX in /etc/default/grub; update-grub; reboot"
)
#: part of the disk below the state, and of terminals, that should be free
FREE = 0.1
PROGRAMS = (
    ("fusermount3", "FAIL", "fuse3", "mounts for users other than root"),
    ("git", "warn", "git", "only for workspace=worktree"),
)
FUSECTL = "/sys/fs/fuse/connections"
#: what sandboxes have of the host, or of their own, and what they never have (prepared.py)
SEEN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/var/lib/dpkg", "/proc", "/dev")
UNSEEN = ("/home", "/root", "/tmp", "/var/tmp", "/sys", "/run/ctx", "/run/ctxfs", "/var/lib/ctxfs")
#: guarantees that a ctxd of an ordinary user cannot give
WEAKER = (
    "agents have your uid: only their sandboxes protect ctxd's files and yours from them",
    "every process with your uid outside of agents is an operator, and could change ctxd itself: "
    "give no agent your home, XDG_RUNTIME_DIR, or a socket of a service that starts programs",
    "histories and output are as safe as your account, not root's",
    "iso=shared is refused, and so is any other owner, uid, gid or groups than yours",
    "agents keep your supplementary groups",
    "an agent can wake processes that wait for the end of another agent, before that end",
    "an agent can create cgroups below its own, and freeze itself; the limits above it hold",
    "agents share the kernel's limits of your uid: processes, user namespaces, inotify watches",
    "only you have agents here; root, and processes with another gid, cannot access the mount",
)
NAMESPACES = (
    ("user/max_user_namespaces", "0", "FAIL", "user namespaces are disabled", "15000"),
    ("kernel/unprivileged_userns_clone", "0", "FAIL", "only root may create user namespaces", "1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "warn",
        "AppArmor restricts user namespaces to programs that have a profile",
        "0",
    ),
)
#: how long a trial of ctxd and of an agent may take, in seconds
TRIAL_SECONDS = 30.0
#: PR_SET_PDEATHSIG (linux/prctl.h)
SET_PDEATHSIG = 1
#: where ctxd says what is wrong
SEE_LOG = "wait, or see its log: journalctl -u ctxd -n 50"
SEE_HOLDER = "end it, and who serves its memory; the log names it: journalctl -u ctxd -n 50"
LANDLOCK = 444, 1  # landlock_create_ruleset(2), LANDLOCK_CREATE_RULESET_VERSION


def version_of(release: str) -> tuple[int, ...]:
    """Return the first two numbers of a kernel release."""
    import re

    return tuple(int(number) for number in re.findall("[0-9]+", release)[:2])


def check_kernel(release: str) -> Finding:
    """Judge a kernel release."""
    numbers = version_of(release)
    note = "" if numbers >= (6, 13) else " (6.13 and newer identify callers faster)"
    problem = f"kernel {release} is too old: no cgroup.kill"
    return judge(numbers >= (5, 14), f"kernel {release}{note}", "FAIL", problem, NEW_KERNEL)


def check_cgroups(mountinfo: str, own: str = "", served: str = "") -> Iterator[Finding]:
    """Judge the cgroup v2 hierarchy in the text of a mountinfo file, and its controllers.

    `own` is the cgroup of an ordinary user's process, below the hierarchy's root. If that user's
    ctxd runs, `served` is the path of its cgroup, which counts instead.
    """
    lines = (line.partition(" - ") for line in mountinfo.splitlines())
    mounts = [before.split()[4] for before, _, after in lines if after.startswith("cgroup2 ")]
    if not mounts:
        yield "FAIL", "cgroup v2 is not mounted", V2_ONLY
        return
    mount = mounts[0]
    groups = [entry.path for entry in os.scandir(mount) if entry.is_dir()]
    killable = not groups or any(os.path.exists(f"{group}/cgroup.kill") for group in groups)
    what = f"cgroup v2 at {mount}"
    yield judge(killable, what, "FAIL", f"{what} has no cgroup.kill", NEW_KERNEL)
    available = first_line(f"{mount}/cgroup.controllers").split()
    remedy = V2_ONLY
    path = served or (own and mount + own)
    if path and all(name in available for name in CONTROLLERS):
        available = first_line(f"{path}/cgroup.controllers").split()
        remedy = (
            "systemctl edit user@.service, with the lines [Service] and Delegate=cpu memory pids; "
            "systemctl daemon-reload; log in again"
        )
    missing = ", ".join(name for name in CONTROLLERS if name not in available)
    problem = f"no {missing} controller in cgroup v2: limits that need one fail with EOPNOTSUPP"
    yield judge(not missing, f"controllers {' '.join(CONTROLLERS)}", "warn", problem, remedy)
    if path:
        yield check_delegated(path)


def check_delegated(path: str) -> Finding:
    """Judge whether a ctxd without root could create cgroups below a cgroup."""
    if path.endswith("/daemon"):  # the leaf into which ctxd moves
        path = path.rpartition("/")[0]
    files = ("", "cgroup.procs", "cgroup.subtree_control")
    ours = all(os.access(os.path.join(path, file), os.W_OK) for file in files)
    what, problem = f"the cgroup {path} belongs to you", f"{path} does not belong to you"
    return judge(ours, what, "warn", problem, DELEGATE)


def check_namespaces(directory: str = "/proc/sys") -> Finding:
    """Judge whether settings let unprivileged users create user namespaces."""
    for file, bad, level, problem, good in NAMESPACES:
        if first_line(f"{directory}/{file}") == bad:
            return level, problem, f"sysctl {file.replace('/', '.')}={good}"
    return "ok", "unprivileged user namespaces", ""


def check_terminals(directory: str = "/proc/sys/kernel/pty") -> Iterator[Finding]:
    """Judge whether agents find terminals: all sandboxes share what the host does not reserve."""
    numbers = [first_line(f"{directory}/{file}") for file in ("nr", "max", "reserve")]
    if not all(map(str.isdecimal, numbers)):
        return  # no Linux with terminals of this kind
    used, most, reserve = map(int, numbers)
    fact = f"{used} terminals are in use of {most - reserve} that agents may open together"
    remedy = "ctx stop the agents that have them (tty in ctx ps --json)"
    remedy += f"; sysctl kernel.pty.max={2 * most}"
    yield judge(used < (1 - FREE) * (most - reserve), fact, "warn", fact, remedy)


def check_programs(uid: int) -> Iterator[Finding]:
    """Judge the programs that ctxd runs."""
    for program, level, package, purpose in PROGRAMS:
        path = find_program(program)
        if path or uid != 0 or program != "fusermount3":
            problem, remedy = f"{program} is missing ({purpose})", f"apt-get install {package}"
            yield judge(bool(path), f"{program}: {path}", level, problem, remedy)


def check_links(etc: str = "/etc") -> Iterator[Finding]:
    """Find links of /etc that lead to something on the host, and nowhere in a sandbox."""
    for directory, below, files in os.walk(etc):
        for path in (f"{directory}/{name}" for name in below + files):
            if not os.path.islink(path) or os.lstat(path).st_uid != 0 or not os.path.exists(path):
                continue
            once = os.path.normpath(os.path.join(directory, os.readlink(path)))
            end = os.path.realpath(path)
            if within(end, (*SEEN, etc)) or within(once, (*SEEN, etc)):
                continue  # a link within /etc is as good as the one to which it leads
            if end != once.replace("/var/run/", "/run/", 1) or within(end, UNSEEN):
                remedy = "make it a file, or give agents that need it: --mount " + end
                yield "warn", f"{path} leads nowhere in sandboxes, which have no {end}", remedy


def within(path: str, directories: Sequence[str]) -> bool:
    """Return whether a path is one of some directories, or below one."""
    return any(path == each or path.startswith(f"{each}/") for each in directories)


def check_identity(uid: int) -> Iterator[Finding]:
    """Judge the interpreter, its user, and the user of the agents."""
    import pwd

    python = "python " + ".".join(map(str, sys.version_info[:3]))
    recent = sys.version_info[:2] >= (3, 11)
    yield judge(recent, python, "FAIL", f"{python} is too old", NEW_PYTHON)
    if uid != 0:
        try:
            yield "ok", f"ctxd would run without root, as {pwd.getpwuid(uid).pw_name}", ""
        except KeyError:
            remedy = f"add one: useradd --uid {uid} --user-group NAME"
            yield "FAIL", f"uid {uid} has no entry in passwd(5), which fusermount3 needs", remedy
        if not os.path.exists("/etc/mtab"):
            problem = "/etc/mtab is missing, without which fusermount3 unmounts nothing"
            yield "FAIL", problem, "ln -s ../proc/self/mounts /etc/mtab"
        return
    yield "ok", "uid 0", ""
    try:
        yield "ok", f"agents of root run as the user ctxfs, uid {pwd.getpwnam('ctxfs').pw_uid}", ""
    except KeyError:
        yield "ok", "there is no system user ctxfs: agents of root run as uid 61000", ""


def status_of(root: Root) -> dict[str, str]:
    """Return the lines of the root's `status`, none without a daemon."""
    with suppress(Failure):
        return pairs(decode(root.read("status")))
    return {}


def check_daemon(root: Root, tries: bool) -> Iterator[Finding]:
    """Judge whether a daemon answers, else if `tries` whether one could start and run an agent."""
    try:
        status = pairs(decode(root.read("status")))
    except Failure as failure:
        if tries:
            yield try_daemon()
        yield "warn", str(failure).partition("; ")[0], start_hint(root.path)
        return
    facts = [f"{key}={status.get(key)}" for key in ("version", "mount", "controllers")]
    what = f"ctxd at {root.path} is {status.get('state')}: {' '.join(facts)}"
    yield judge(status.get("state") == "ready", what, "warn", what, SEE_LOG)


def try_daemon() -> Finding:
    """Start a ctxd with places of its own, have it run an agent, and end it.

    Nothing that this program could look at says as surely what ctxd needs.
    """
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "ctxd")
    program = beside if os.access(beside, os.X_OK) else find_program("ctxd")
    if not program:
        return "FAIL", "ctxd is not installed, only ctx", "install the package ctxfs"
    doctor, (read, write) = os.getpid(), os.pipe()
    if os.fork() == 0:  # it tidies up, whatever becomes of this process
        os.close(read)
        try:
            said = try_out(program, doctor)
        except Exception as error:
            said = str(error)
        except BaseException:
            os._exit(FAILED)
        os.write(write, f"{said}\n".encode())
        os._exit(OK)
    os.close(write)
    with open(read, encoding="utf-8") as answer:
        said = answer.read() or "what tries a ctxd was killed\n"
    what = "ctxd starts here, and runs an agent and a child of it"
    return judge(said == "\n", what, "FAIL", said.rstrip("\n"), "")


def try_out(program: str, doctor: int) -> str:
    """Return why no ctxd works in a new directory, which is gone by then; empty if one does.

    If the doctor is killed or interrupted, end the trial.
    """
    import ctypes
    import shutil
    import signal
    import tempfile
    from subprocess import DEVNULL, run

    os.setsid()  # Ctrl-C is for the doctor
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != doctor:
        sys.exit()
    above = user_directory(os.getuid()) if os.getuid() else "/run"
    place = tempfile.mkdtemp(prefix="ctxfs-doctor-", dir=above if os.path.isdir(above) else None)
    try:
        os.chmod(place, 0o711)  # agents must get there
        return trial(program, place)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        unmount = "fusermount3 -uqz" if os.getuid() else "umount -l"
        with suppress(OSError):  # no such program: then nothing was mounted
            # of a ctxd that was killed
            run([*unmount.split(), os.path.join(place, "mount")], stderr=DEVNULL, check=False)
        shutil.rmtree(place, ignore_errors=True)


def trial(program: str, place: str) -> str:
    """Return why no ctxd starts in an empty directory or runs an agent; empty if one does."""
    from subprocess import DEVNULL, PIPE, Popen, run
    from threading import Timer

    wrong = run([program, "--check-config"], stdin=DEVNULL, stderr=PIPE, check=False)
    if wrong.returncode:
        return last_line(wrong.stderr)
    mount = os.path.join(place, "mount")
    words = [program, "--mount", mount, "--config", os.path.join(place, "config.yaml")]
    for option in ("state", "runtime"):
        words += [f"--{option}", os.path.join(place, option)]
    if os.getuid() == 0:
        words += ["--cgroup", os.path.basename(place)]
    elif os.path.exists(f"/run/user/{os.getuid()}/systemd") and find_program("systemd-run"):
        scope = "systemd-run --user --scope --quiet --property Delegate=yes --"
        words = [*scope.split(), *words]
    os.mkdir(mount)
    os.close(os.open(os.path.join(place, "config.yaml"), os.O_CREAT | os.O_WRONLY, 0o644))
    # which starts a child: a cell in a cell
    inner = ("ctx", "spawn", "inner", "--wait", "--", "true")
    agent = [sys.argv[0], "--root", mount, "spawn", "trial", "--wait", "--", *inner]
    with Popen(words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE) as daemon:
        timer = Timer(TRIAL_SECONDS, daemon.kill)
        timer.start()
        try:
            said = b""
            for said in daemon.stderr or ():
                if said == b"ready\n":
                    done = run(agent, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, check=False)
                    return last_line(done.stderr) if done.returncode else ""
            return last_line(said)
        finally:
            daemon.terminate()
            daemon.wait()
            timer.cancel()


def last_line(said: bytes) -> str:
    """Return the last line of what a program said, without the program's name."""
    line = decode(said).strip().rpartition("\n")[2]
    return line.removeprefix("ctxd: ").removeprefix("ctx: ")


def check_names(root: Root) -> Iterator[Finding]:
    """Judge whether somebody holds the lock of the directory of agents."""
    import select

    child = os.fork()
    if child == 0:  # which cannot be ended while it waits
        os.closerange(0, 1 << 16)
        with suppress(OSError):
            os.stat(root.join("agent/.doctor"))
        os._exit(0)
    pidfd = os.pidfd_open(child)
    poller = select.poll()  # select(2) knows no descriptor above 1023
    poller.register(pidfd, select.POLLIN)
    if poller.poll(1000 * ANSWER_SECONDS):
        os.waitpid(child, 0)
    else:
        yield "FAIL", "no agent is found or made: a process holds the lock of agent/", SEE_HOLDER
    os.close(pidfd)


def check_room(root: Root) -> Iterator[Finding]:
    """Judge what is free on the disk of the state, and whether all was written to it."""
    try:
        lines = decode(root.read("metrics")).splitlines()
        facts = dict(line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
        free, size = (int(facts[f"ctxfs_state_{name}_bytes"]) for name in ("free", "size"))
        waiting = int(facts["ctxfs_changes_waiting"])
    except (Failure, KeyError, ValueError):
        return  # no daemon, or an older one
    if size <= 0:
        return  # not looked at yet
    fact = f"{free >> 20} of {size >> 20} MiB are free below the state"
    remedy = "see who has what: ctx quota; remove what is over: ctx rm NAME"
    yield judge(free >= FREE * size, fact, "warn", f"only {fact}", remedy)
    if waiting:
        yield "FAIL", f"{waiting} changes are in memory only: the disk is full", remedy


def check_trees(status: dict[str, str]) -> Iterator[Finding]:
    """Judge how durable trees are bounded."""
    if "trees" not in status:
        return  # no daemon, or an older one
    soft = "the bound of durable trees is soft: who fills one is paused once that is measured"
    remedy = (
        "root's daemon, on ext4 (tune2fs -O quota,project) or xfs: mount the file system of the "
        "state with prjquota, set disk_projects and start ctxd again"
    )
    fact = "the kernel bounds durable trees by project quotas"
    yield judge(status["trees"] == "hard", fact, "warn", soft, remedy)


def check_mounts(mountinfo: str, directory: str) -> Iterator[Finding]:
    """Judge whether agents keep the mount after a crash of a ctxd without root."""
    mounts = {}
    for line in mountinfo.splitlines():
        fields = line.partition(" - ")[0].split()
        mounts[fields[4]] = any(field.startswith("shared:") for field in fields[6:])
    place = os.path.realpath(directory)
    while place not in mounts and place != "/":
        place = os.path.dirname(place)
    what = f"{directory} is on a shared mount: agents find {DEFAULT_ROOT} again after a crash"
    problem = f"{directory} is not on a shared mount ({place}): agents that survive a crash of "
    problem += f"ctxd lose {DEFAULT_ROOT}"
    yield judge(mounts.get(place, False), what, "warn", problem, f"mount --make-shared {place}")
    problem = f"nothing is mounted at {FUSECTL}: if ctxd dies in the middle of a call, it hangs"
    remedy = f"mount -t fusectl none {FUSECTL}"
    yield judge(FUSECTL in mounts, f"fusectl at {FUSECTL}", "warn", problem, remedy)


def check_lingering(name: str, manager: str, directory: str = "/var/lib/systemd/linger") -> Finding:
    """Judge whether the ctxd of a user goes on after a logout.

    `manager` is the runtime directory of the user's systemd, which ends with the last session.
    """
    lingers = not os.path.exists(manager) or os.path.exists(f"{directory}/{name}")
    problem = "your ctxd and its agents end with your last login"
    what = "your ctxd and its agents do not end with your login"
    remedy = f"loginctl enable-linger {name}, as root if you are denied it"
    return judge(lingers, what, "warn", problem, remedy)


def is_rootless(root: Root, uid: int) -> bool:
    """Return whether an ordinary user runs ctxd, or would if it started now."""
    try:
        return uid != 0 and os.stat(root.path).st_uid != 0
    except OSError:
        return uid != 0


def landlock_abi() -> int:
    """Return the version of Landlock in the kernel, -1 for none."""
    import ctypes

    number, version = LANDLOCK
    return int(ctypes.CDLL(None).syscall(number, None, ctypes.c_size_t(0), version))


def check_landlock(abi: int, release: str = "") -> Finding:
    """Judge whether a kernel keeps agents away from each other and from abstract sockets."""
    problem = (
        "Landlock has no scopes: an agent can trace its children's programs and read their "
        "memory; with network:default, it can connect to the host's abstract sockets"
    )
    remedy = "with lsm= in /etc/default/grub, add landlock to it; update-grub; reboot"
    if version_of(release) >= (6, 12):
        remedy += "; in a container, its system call filter may refuse landlock_create_ruleset(2)"
    else:
        remedy = f"install Linux 6.12 or newer: apt-get install linux-image-amd64; {remedy}"
    fact = f"Landlock ABI {abi}: isolates parents from children, and abstract sockets"
    return judge(abi >= 6, fact, "warn", problem, remedy)


def findings(root: Root) -> Iterator[Finding]:
    """Yield all findings."""
    import pwd

    uid = os.getuid()
    rootless = is_rootless(root, uid)
    mountinfo = decode(read_file("/proc/self/mountinfo"))
    status = status_of(root)
    own = served = ""
    if rootless:
        lines = decode(read_file("/proc/self/cgroup")).splitlines()
        own = "".join(line[3:] for line in lines if line.startswith("0::"))
        served = status.get("cgroup", "")
    yield check_kernel(os.uname().release)
    yield from check_cgroups(mountinfo, own, served)
    yield check_namespaces()
    yield check_landlock(landlock_abi(), os.uname().release)
    yield from check_terminals()
    yield from check_programs(uid if rootless else 0)
    yield from check_identity(uid)
    yield from check_links()
    if rootless:
        yield from check_mounts(mountinfo, user_directory(uid))
        with suppress(KeyError):
            yield check_lingering(pwd.getpwuid(uid).pw_name, f"/run/user/{uid}/systemd")
    yield from check_daemon(root, uid == 0 or rootless)
    yield from check_room(root)
    yield from check_trees(status)
    yield from check_networks(status, rootless)
    yield from check_nodes(root)
    yield from check_names(root)
    if rootless:
        for sentence in WEAKER:
            yield "weak", sentence, ""


@command("doctor", *LISTING)
def do_doctor(root: Root, args: Arguments) -> int:
    """Show what this machine lacks, and how to get it.

    Exits 1 if anything is FAIL.
    """
    found = list(findings(root))
    rows = [{"level": level, "what": what, "remedy": fix} for level, what, fix in found]
    lines: list[list[Part]] = [
        [(level, level), f"{'':<{6 - len(level)}}{what}{'; ' * bool(fix)}{fix}"]
        for level, what, fix in found
    ]
    show(rows, lines, args.json)
    return FAILED if any(level == "FAIL" for level, _, _ in found) else OK
