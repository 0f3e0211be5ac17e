"""The proxy of contrib/proxy as a unit, with an agent that reaches it and nothing else."""

from __future__ import annotations

import grp
import os
import subprocess
from pathlib import Path

from client import doctor
from tests.systemd.service import SECONDS, Service, systemctl
from tests.worlds.daemon import read, wait_dead, wait_until, write

PROXY = Path(__file__).parents[2] / "contrib" / "proxy"
UNIT = "ctxfs-proxy.service"
CONFIG = Path("/etc/ctxfs/config.yaml")
ETC = Path("/etc/ctxfs/proxy")
SOCKET = Path("/run/ctxfs-proxy/anthropic.sock")
KEY = "the-operators-own-key"


def _install() -> None:
    """As its README says, with one API."""
    add = ("adduser", "--quiet", "--system", "--group", "--no-create-home", "ctxfs-relay")
    subprocess.run(add, check=True, timeout=SECONDS)
    (ETC / "apis").mkdir(parents=True)
    (ETC / "keys").mkdir(mode=0o700)
    for name in ("nginx.conf", "headers.conf", "apis/anthropic.conf"):
        (ETC / name).write_text((PROXY / name).read_text())
    key = ETC / "keys" / "anthropic.conf"
    key.touch(mode=0o600)
    key.write_text(f'proxy_set_header x-api-key "{KEY}";\n')
    Path("/etc/systemd/system", UNIT).write_text((PROXY / UNIT).read_text())
    # there is no name server
    with open("/etc/hosts", "a") as hosts:
        hosts.write("127.0.0.1 api.anthropic.com\n")
    systemctl("daemon-reload")


def test_an_agent_reaches_the_proxy_by_its_relay(service: Service) -> None:
    _install()
    systemctl("start", UNIT)
    wait_until(SOCKET.exists, "the proxy listens")
    found = os.stat(SOCKET.parent)
    assert (found.st_uid, grp.getgrgid(found.st_gid).gr_name) == (0, "ctxfs-relay")
    assert found.st_mode & 0o777 == 0o750
    CONFIG.write_text(f"networks: {{api: {{socket: {SOCKET}, port: 8081}}}}\n")
    systemctl("reload", "ctxd.service")
    status = service.root / "status"
    wait_until(lambda: "network.api=" in status.read_text(), "the network is configured")
    _, relay, _ = status.read_text().partition("network.api=")[2].split("\n")[0].split(" ")
    judged = [each[:2] for each in doctor.check_network("n", int(relay), str(SOCKET))]
    assert [level for level, _ in judged] == ["ok", "ok"], judged
    script = (
        'for path in v1/messages v1/files; do curl -sS -m 30 -o /dev/null -d x '
        '-w "%{http_code} " $CTX_NET_API/$path; done; env'
    )
    agent = service.agent_dir("proxied")
    agent.mkdir()
    write(agent / "policy", "allow proxied_t network:api connect")
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
    systemctl("reload", UNIT)
    systemctl("stop", UNIT)
    assert not SOCKET.exists()
    CONFIG.unlink()
    systemctl("reload", "ctxd.service")
