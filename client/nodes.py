"""The nodes at which agents may be placed, and the end of a link on the other machine.

The key of the daemon, and the keys of hosts that it knows, are files of the account of its links,
which reads what other machines say: so only processes of that account touch them.
"""

from __future__ import annotations

import os
import re
import time

from client.declaring import LISTING, Arguments, command, flag, operand, option
from client.exits import DENIED, FAILED, OK, USAGE, Failure, Misuse
from client.files import timestamp
from client.loop import BLOCK, POLLIN, POLLOUT, parse_object
from client.networks import Finding, judge
from client.output import Part, headed, show, show_rows
from client.root import Root, own_agent
from client.sockets import MESSAGE_CODES, NO_ANSWER, answer, ask, connect_daemon, refusal
from client.types import Any, Iterator

CHECK_CODES = {**MESSAGE_CODES, "ENOENT": USAGE}
OWN_KEYS = "your keys of ssh have your uid, as agents do: only sandboxes keep agents from them"
HANGUP = ~(POLLIN | POLLOUT)
#: of a line of authorized_keys: the key leads to ctxd alone
RESTRICTED = 'restrict,command="ctx peer"'
SHELL = "the key gets a shell there"
RESTRICT = f"begin its line in authorized_keys with {RESTRICTED}"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
GREETING = b"ctxfs-peer "  # of a daemon that serves another one


class Flow:
    """Bytes on their way from one descriptor to another, at most a block at once."""

    def __init__(self, source: int, target: int, left: bytes = b"") -> None:
        self.source, self.target = source, target
        self.left = left

    def wants(self) -> tuple[int, int]:
        """Return the descriptor that it waits for, and the event."""
        return (self.target, POLLOUT) if self.left else (self.source, POLLIN)

    def step(self) -> bool:
        """Read, or write; return False at the end."""
        if self.left:
            self.left = self.left[os.write(self.target, self.left) :]
            return True
        self.left = os.read(self.source, 4 * BLOCK)
        return bool(self.left)


def copy(flows: list[Flow]) -> None:
    """Copy in every direction, until one of them has ended."""
    import select

    for flow in flows:
        os.set_blocking(flow.target, False)
    while True:
        poller = select.poll()
        wanted: dict[int, int] = {}
        for fd, event in (flow.wants() for flow in flows):
            wanted[fd] = wanted.get(fd, 0) | event
        for fd, events in wanted.items():
            poller.register(fd, events)
        ready = dict(poller.poll())
        for flow in flows:
            fd, event = flow.wants()
            try:
                if ready.get(fd, 0) & (event | HANGUP) and not flow.step():
                    return
            except BlockingIOError:
                pass
            except OSError:
                return


@command("peer")
def do_peer(root: Root, args: Arguments) -> None:
    """Connect a daemon of another machine to the one of this machine.

    For the command of a link: standard input and output lead to ctxd, until either side ends. On
    its own machine, ctxd does with them what your user may do.
    """
    if os.isatty(0):
        raise Misuse("peer is for the command of a link, not for a terminal: ctx help nodes")
    connection = connect_daemon(root)
    ask(connection, op="peer")
    first = connection.recv(BLOCK)
    if not first.startswith(GREETING):
        frame = parse_object(first.partition(b"\n")[0])
        raise refusal(frame or {"message": NO_ANSWER}, MESSAGE_CODES)
    own = connection.fileno()
    copy([Flow(0, own), Flow(own, 1, first)])


def cell(row: dict[str, Any], key: str) -> str:
    """Return what a table shows of a node."""
    value = row.get(key)
    if key in ("since", "seen"):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else "-"
    return str(value or "-")


def usable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the file `nodes` as ctxd tells operators the same."""
    times = {key: timestamp(row[key]) if row[key] else 0 for key in ("since", "seen")}
    return {**row, **times, "product": row["version"]}


@command("nodes list", *LISTING)
def do_nodes(root: Root, args: Arguments) -> None:
    """List the nodes at which you may place agents."""
    if own_agent(root):  # which may not ask ctxd about links
        rows = [*map(usable, filter(None, map(parse_object, root.read("nodes").splitlines())))]
    else:
        rows = answer(connect_daemon(root), op="nodes").get("nodes", [])
    columns = headed("name", "state", "since", "seen", "product", "error")
    show_rows(rows, columns, cell, args.json)


@command("nodes check", *LISTING, operand("name", "[NAME...]", "default: all nodes"))
def do_check(root: Root, args: Arguments) -> int:
    """Open the links to nodes, and show what is there.

    Exits 1 if one of them cannot be used; each line says how to cure that. Exits 2 for a node that
    is not configured for you.
    """
    told = answer(connect_daemon(root), op="nodes")
    listed = [str(row.get("name")) for row in told.get("nodes", ())]
    names = args.name or listed or told.get("configured")
    if not names:
        raise Failure("no nodes are configured for you: add nodes to the configuration of ctxd")
    rows = []
    for name in names:
        found = answer(connect_daemon(root), CHECK_CODES, op="nodes", check=name)
        rows += found.get("nodes", ())
    show(rows, [line for row in rows for line in described(row)], args.json)
    return OK if all(row.get("state") == "up" and row.get("restricted") for row in rows) else FAILED


def described(row: dict[str, Any]) -> list[list[Part]]:
    """Return the lines that tell of a node that was tried."""
    name = str(row.get("name"))
    if row.get("state") != "up":
        return [[("FAIL", "FAIL"), f" {name}: {row.get('error') or 'no link'}"]]
    if not row.get("restricted"):
        return [[("FAIL", "FAIL"), f" {name}: {SHELL}: {RESTRICT}"]]
    networks = " ".join(map(str, row.get("networks") or ())) or "none"
    what = (
        f"{row.get('host.node')} runs ctxd {row.get('product')}, and calls this machine "
        f"{row.get('alias')}; {1000 * float(row.get('trip') or 0):.1f} ms to connect; "
        f"leases up to {row.get('lease_max'):g} s; networks: {networks}"
    )
    return [[("ok", "ok"), f" {name}: {what}"]]


def check_nodes(root: Root) -> Iterator[Finding]:
    """Judge the links to nodes, as far as they are open or were, and who may read their key."""
    try:
        told = answer(connect_daemon(root), op="nodes")
    except Failure:
        return  # no daemon, or an older one
    for row in told.get("nodes", ()):
        yield check_link(root, row, "configured" in told)
    if told.get("ssh"):
        keys = told["keys"]
        yield check_keys(*keys[:2]) if keys else ("weak", OWN_KEYS, "")


def check_link(root: Root, row: dict[str, Any], is_master: bool) -> Finding:
    """Judge a link; only if it is up, open another connection, to see what its key is for."""
    what, state = f"node {row.get('name')}", row.get("state")
    if row.get("error"):
        return "warn", f"{what}: {row['error']}", f"ctx nodes check {row.get('name')}"
    if state == "up" and is_master:
        rows = answer(connect_daemon(root), op="nodes", check=row.get("name")).get("nodes")
        restricted = bool(rows and rows[0].get("restricted"))
        return judge(restricted, f"{what} is up", "FAIL", f"{what}: {SHELL}", RESTRICT)
    return "ok", f"{what} is {state}" + ": no agent needs it" * (state == "idle"), ""


def check_keys(directory: str, uid: int) -> Finding:
    """Judge whether the links of a daemon of root have a key that nobody else can read."""
    import pwd

    try:
        pwd.getpwuid(uid)
    except KeyError:
        remedy = "useradd --system ctxfs-link, or name another one; systemctl reload ctxd"
        return "FAIL", f"link_user: ssh runs for no uid without a user, such as {uid}", remedy
    try:
        found = [os.stat(path) for path in (directory, f"{directory}/key")]
    except OSError as error:
        return "warn", f"no key of links: {error.filename}: {error.strerror}", "ctx nodes add"
    private = all(each.st_uid == uid and not each.st_mode & 0o077 for each in found)
    problem = f"others than uid {uid} (link_user) may read the key in {directory}"
    remedy = f"chown -R {uid} {directory}; chmod 700 {directory}; chmod 600 {directory}/key"
    return judge(private, f"the key of links in {directory}", "FAIL", problem, remedy)


class Keys:
    """The keys of a daemon's links, in the directory of their account."""

    def __init__(self, directory: str, uid: int, gid: int) -> None:
        self.directory, self.uid, self.gid = directory, uid, gid

    def run(self, *words: str, input: str = "") -> tuple[int, str]:
        """Run a command as their account, in their directory; return its status and output."""
        import subprocess

        done = subprocess.run(
            words, input=input, capture_output=True, text=True, errors="replace", check=False,
            cwd=self.directory, user=self.uid, group=self.gid, extra_groups=(),
        )  # fmt: skip
        return done.returncode, done.stdout if done.returncode == 0 else done.stderr.strip()

    def make(self) -> None:
        """Make the directory if it is not there."""
        import pwd

        try:
            pwd.getpwuid(self.uid)
        except KeyError:
            raise Failure(
                f"ssh runs for no uid without a user, such as {self.uid}: make the user ctxfs-link "
                "(useradd --system ctxfs-link), and reload ctxd"
            ) from None
        if not os.path.isdir(self.directory):
            os.mkdir(self.directory, 0o700)
            os.chown(self.directory, self.uid, self.gid)

    def public(self, alias: str) -> str:
        """Return the public key, of a pair that is made if there is none."""
        if self.run("test", "-e", "key")[0]:
            words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"ctxfs@{alias}")
            status, said = self.run(*words, "-f", "key")
            if status:
                raise Failure(f"cannot make a key: {said}")
        status, said = self.run("ssh-keygen", "-y", "-f", "key")
        if status:
            raise Failure(f"cannot read the key in {self.directory}: {said}")
        return said.strip()

    def scan(self, address: str, port: str) -> list[str]:
        """Return the keys that a host shows: NAME TYPE KEY."""
        status, said = self.run("ssh-keyscan", "-T", "10", "-p", port, "--", address)
        lines = [line for line in said.splitlines() if len(line.split()) == 3]
        if status or not lines:
            raise Failure(
                f"{address}: no ssh answers at port {port}: is the address right, and sshd there?"
            )
        return lines

    def known(self, name: str) -> dict[str, str]:
        """Return the keys of a host that are known, by their type."""
        _, said = self.run("ssh-keygen", "-F", name, "-f", "known_hosts")
        words = [line.split()[1:3] for line in said.splitlines() if line[:1] not in ("#", "")]
        return {pair[0]: pair[1] for pair in words if len(pair) == 2}

    def fingerprint(self, line: str) -> str:
        status, said = self.run("ssh-keygen", "-lf", "-", input=line)
        if status:
            raise Failure(f"cannot read a key of the host: {said}")
        return said.strip()

    def trust(self, address: str, port: str, fingerprint: str) -> None:
        """Have a host known, by the word of a person."""
        name = address if port == "22" else f"[{address}]:{port}"
        shown = self.scan(address, port)
        known = self.known(name)
        for line in shown:
            _, kind, key = line.split()
            if known.get(kind, key) != key:
                raise Failure(
                    f"{address} shows another key than the known one: it was installed anew, or "
                    "somebody stands between. If you know why, remove the known one: ssh-keygen "
                    f"-R {name} -f {self.directory}/known_hosts"
                )
        if not any(line.split()[1] in known for line in shown):
            chosen = self.chosen(address, shown, fingerprint)
            lines = "".join(f"{line}\n" for line in chosen)
            status, said = self.run("sh", "-c", "cat >> known_hosts", input=lines)
            if status:
                raise Failure(f"cannot write known_hosts: {said}")

    def chosen(self, address: str, shown: list[str], fingerprint: str) -> list[str]:
        """Return the lines of keys that a person says are the host's."""
        prints = {line: self.fingerprint(line) for line in shown}
        if fingerprint:
            found = [line for line, text in prints.items() if fingerprint in text.split()]
            if not found:
                raise Failure(f"{address} shows no key with the fingerprint {fingerprint}")
            return found
        if not os.isatty(0):
            raise Misuse(f"nobody can be asked whether these are keys of {address}: name one with "
                         f"--fingerprint: {'; '.join(prints.values())}")  # fmt: skip
        asked = [f"{address} shows these keys:", *(f"  {text}" for text in prints.values())]
        asked.append("There, ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub shows its own.")
        show(None, asked, False)
        if input("Are they the same? yes or no: ").strip().lower() not in ("y", "yes"):
            raise Failure("nothing was changed")
        return shown


@command(
    "nodes add",
    operand("name", "NAME", "the name of the node"),
    operand("address", "ADDRESS", "where ssh finds it, without a login"),
    option("--port", "PORT", "the port of its sshd (default: 22)", default="22"),
    option("--fingerprint", "PRINT", "of its host key, instead of a question", default=""),
)
def do_add(root: Root, args: Arguments) -> None:
    """Prepare a node that ssh leads to, and print what is to be added where.

    Makes the key of the daemon if there is none, and notes the key of the node when you have
    confirmed it. Changes neither the node nor the configuration. Only root may do this, or the
    user of a daemon without root, whose own ssh leads to nodes.
    """
    setting = answer(connect_daemon(root), op="nodes")
    if "configured" not in setting:
        raise Failure("only root, or the user who runs ctxd, adds nodes", DENIED)
    if args.name in setting["configured"]:
        raise Failure(f"{args.name}: there is such a node already: ctx nodes check {args.name}")
    if not NAME.fullmatch(args.name):
        raise Misuse("NAME is made of a-z A-Z 0-9 . _ + -, with a letter or digit first")
    if not args.address or args.address[0] == "-" or "@" in args.address or not args.port.isdigit():
        raise Misuse("ADDRESS is a name or address without a login, and PORT a number")
    where = f"On {args.address}, in ~/.ssh/authorized_keys of each user who is to run agents there"
    if setting["keys"] is None:
        key = f"{where}, the line of your key may begin with this, so that it leads to ctxd alone:"
        line = RESTRICTED
    else:
        keys = Keys(*setting["keys"])
        keys.make()
        keys.trust(args.address, args.port, args.fingerprint)
        key, line = f"{where}, add:", f"{RESTRICTED} {keys.public(setting['alias'])}"
    options = "" if args.port == "22" else f", options: [-oPort={args.port}]"
    told = [key, "", line, "", "In the configuration of ctxd here, add to nodes:", ""]
    told += ["nodes:", f'  {args.name}: {{ssh: "{args.address}"{options}}}', ""]
    show(None, [*told, f"Then reload ctxd (SIGHUP), and look: ctx nodes check {args.name}"], False)


@command(
    "nodes forget",
    operand("name", "NAME", "the name of the node"),
    flag("--lead", "NAME is a lead: what its agents have left here goes"),
)
def do_forget(root: Root, args: Arguments) -> None:
    """Forget what was at a node that is gone for good, or was set up anew.

    A node that answers takes away the durable homes and worktrees that agents left there. Refused
    as long as agents are there.
    """
    answer(connect_daemon(root), op="nodes", forget=args.name, lead=args.lead)
