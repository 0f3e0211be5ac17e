"""The proxy of contrib/web with its units, installed as its README says, and an agent that reaches
the hosts of its list, of which there are none in this machine."""

from __future__ import annotations

import pwd
import socket
import subprocess
from pathlib import Path

import pytest

from client import networks
from tests.systemd.service import CHECKOUT, SECONDS, Service, systemctl
from tests.worlds.daemon import read, wait_dead, wait_until, write
from tests.worlds.pages import markdown_blocks

README = CHECKOUT / "contrib" / "web" / "README.md"
CONFIG = Path("/etc/ctxfs/config.yaml")
SOCKET = Path("/run/ctxfs-web/web.sock")
#: of nobody
ADDRESS = "203.0.113.7"
ASKS = (
    "for host in listed other; do "
    'curl -s -m 30 -o /dev/null -w "%{http_connect} " https://$host.test/; done'
)


def _install() -> None:
    """The packages are there, and this machine has neither a network nor clients."""
    with open("/etc/hosts", "a") as hosts:
        hosts.write(f"{ADDRESS} listed.test\n")
    for block in markdown_blocks(README, "Install"):
        if block.startswith("networks:"):
            CONFIG.write_text(block)
            continue
        lines = [
            line.replace("ctxfs-web-list --follow pip npm", "echo listed.test")
            for line in block.splitlines()
            if not line.startswith(("apt-get", "agent", "systemctl disable", "ctx doctor"))
        ]
        subprocess.run(["sh", "-euc", "\n".join(lines)], cwd=README.parent, check=True,
                       timeout=SECONDS)  # fmt: skip


def _user(unit: str) -> str:
    main = systemctl("show", "--value", "--property", "MainPID", unit).strip()
    return pwd.getpwuid(Path("/proc", main).stat().st_uid).pw_name


def test_an_agent_reaches_the_hosts_of_a_list(service: Service) -> None:
    _install()
    status = service.root / "status"
    wait_until(lambda: "kind.web=http_proxy" in status.read_text(), "the network is configured")
    agent = service.agent_dir("webbed")
    agent.mkdir()
    write(agent / "policy", "allow webbed_t network:web connect")
    write(agent / "exec", f"sh -c '{ASKS}'")
    write(agent / "ctl", "start")
    wait_dead(agent)
    # nobody serves the host in this machine
    assert read(agent, "out") == "503 403 ", read(agent, "out") + read(agent, "log")
    life = read(agent, "incarnation").strip()
    asked = ("journalctl", "--quiet", "--unit", "ctxfs-web", "--identifier", "squid")

    def told() -> bool:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS, check=True)
        return f":{life[-4:].lstrip('0')} CONNECT listed.test:443 503" in done.stdout

    wait_until(told, "it is in the journal")
    assert (_user("ctxfs-web@web.service"), _user("ctxfs-web.service")) == ("ctxfs-web", "proxy")
    relay = int(status.read_text().partition("network.web=")[2].split()[1])
    path = str(SOCKET)
    assert [level for level, _, _ in networks.check_network(
        "n", relay, path, "proxy", "http_proxy")] == ["ok", "ok"]  # fmt: skip
    assert "may not connect" in next(networks.check_network("n", 61000, path))[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 3128))
    assert [level for level, _, _ in networks.check_lists(networks.LISTS)] == ["ok"]
    # a mistake changes nothing
    mistaken = Path("/etc/ctxfs/web/lists/x.conf")
    mistaken.write_text("nonsense\n")
    with pytest.raises(AssertionError):
        systemctl("reload", "ctxfs-web")
    assert _user("ctxfs-web.service") == "proxy"
    mistaken.unlink()
    systemctl("reload", "ctxfs-web")
    systemctl("stop", "ctxfs-web")
    assert not SOCKET.exists()
    CONFIG.unlink()
    systemctl("reload", "ctxd.service")
