"""Proxy and meter of contrib/proxy as units, with an agent that reaches them and nothing else."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
from pathlib import Path

from client import networks
from tests.systemd.service import CHECKOUT, SECONDS, Service, systemctl
from tests.worlds.daemon import read, wait_dead, wait_until, write
from tests.worlds.pages import markdown_blocks

README = CHECKOUT / "contrib" / "proxy" / "README.md"
UNITS = ("ctxfs-proxy.service", "ctxfs-meter.service")
CONFIG = Path("/etc/ctxfs/config.yaml")
KEYS = Path("/etc/ctxfs/proxy/keys/anthropic.conf")
BEHIND = Path("/run/ctxfs-proxy/anthropic.sock")
SOCKET = Path("/run/ctxfs-meter/anthropic.sock")
KEY = "the-operators-own-key"


def _install() -> None:
    """As its README says, with one API. The packages are there, and this machine has no name
    server."""
    meter = Path("/etc/systemd/system", UNITS[1])
    meter.write_text((README.parent / UNITS[1]).read_text())
    _let_it_see_python(UNITS[1])
    with open("/etc/hosts", "a") as hosts:
        hosts.write("127.0.0.1 api.anthropic.com\n")
    for block in markdown_blocks(README, "Install"):
        if block.startswith("networks:"):
            CONFIG.write_text(block)
            continue
        lines = [
            line.replace("restart ctxd", "reload ctxd")
            for line in block.splitlines()
            if not line.startswith(("apt-get", "systemctl disable", "ctx doctor"))
        ]
        subprocess.run(["bash", "-euc", "\n".join(lines)], cwd=README.parent, text=True,
                       input=f"{KEY}\n", check=True, timeout=SECONDS)  # fmt: skip


def _let_it_see_python(unit: str) -> None:
    """The Python of the tests may be in a home, which the unit hides and only its user enters."""
    python = Path(sys.executable).resolve()
    if python.parts[1] not in ("root", "home"):
        return
    print(f"{unit} is tested without ProtectHome=: {python} executes it")
    more = Path(f"/etc/systemd/system/{unit}.d/python.conf")
    more.parent.mkdir()
    more.write_text("[Service]\nProtectHome=no\n")
    for directory in python.parents:
        directory.chmod(directory.stat().st_mode | 0o111)


def test_an_agent_reaches_them_by_its_relay(service: Service) -> None:
    _install()
    assert KEYS.stat().st_mode & 0o777 == 0o600
    wait_until(BEHIND.exists, "the proxy listens")
    for path, owner, group in (
        (BEHIND, "root", "ctxfs-meter"),
        (SOCKET, "ctxfs-meter", "ctxfs-relay"),
    ):
        found = os.stat(path.parent)
        assert pwd.getpwuid(found.st_uid).pw_name == owner
        assert grp.getgrgid(found.st_gid).gr_name == group
        assert found.st_mode & 0o777 == 0o750
    status = service.root / "status"
    wait_until(lambda: "network.anthropic=" in status.read_text(), "the network is configured")
    _, relay, _ = status.read_text().partition("network.anthropic=")[2].split("\n")[0].split(" ")
    level, what, _ = next(networks.check_network("n", int(relay), str(SOCKET)))
    assert level == "ok", what
    _, what, _ = next(networks.check_network("n", int(relay), str(BEHIND)))
    assert "may not connect" in what, "no relay passes the meter"
    script = (
        'for path in v1/messages v1/files; do curl -sS -m 30 -o /dev/null -d "{\\"model\\": 1}" '
        '-w "%{http_code} " $CTX_NET_ANTHROPIC/$path; done; env'
    )
    agent = service.agent_dir("proxied")
    agent.mkdir()
    write(agent / "policy", "allow proxied_t network:anthropic connect")
    write(agent / "exec", f"sh -c '{script}'")
    write(agent / "ctl", "start")
    wait_dead(agent)
    # nobody serves the API in this machine
    assert read(agent, "out").startswith("502 403 "), read(agent, "out") + read(agent, "log")
    assert KEY not in read(agent, "out")
    asked = ("journalctl", "--quiet", "--identifier", "ctxfs_proxy", "--output", "cat")

    def told() -> bool:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS, check=True)
        return "POST /v1/messages 502" in done.stdout

    wait_until(told, "it is in the journal")
    assert "\nrequests=1\n" in read(agent, "usage")
    systemctl("reload", *UNITS)
    systemctl("disable", "--now", *UNITS)
    assert not SOCKET.exists() and not BEHIND.exists()
    CONFIG.unlink()
    systemctl("reload", "ctxd.service")
