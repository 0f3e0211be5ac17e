"""Events from outside (contrib/webhook) with their unit, the server of Debian, and nginx before it:
installed and used as the README says, by a user who is nobody to ctxd."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import pwd
import ssl
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.systemd.service import CHECKOUT, SECONDS, Service, systemctl
from tests.worlds.daemon import read, wait_until
from tests.worlds.pages import markdown_blocks

README = CHECKOUT / "contrib" / "webhook" / "README.md"
UNIT = "ctxfs-webhook.service"
HOST = "hooks.example.org"
SECRETS = Path("/etc/ctxfs/webhook/secrets")
EVENT = {
    "action": "closed",
    "pull_request": {"number": 7, "merged": True},
    "sender": {"login": "ann"},
}
TOLD = "action=closed\nnumber=7\nmerged=true\nsender=ann\n"
#: what its README leaves to whoever has a name and a certificate for it
_BEFORE = f"""
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={HOST} \
    -out /etc/ssl/{HOST}.pem -keyout /etc/ssl/private/{HOST}.key
systemctl start nginx
"""


def _sh(script: str) -> None:
    done = subprocess.run(
        ["sh", "-euc", f"PATH=/ctx/bin:$PATH\n{script}"],
        cwd=README.parent, capture_output=True, text=True, timeout=4 * SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _install() -> str:
    """The packages are there: this machine has no network."""
    lines = "".join(markdown_blocks(README, "Install")).splitlines()
    return "\n".join(line for line in lines if not line.startswith("apt-get"))


def _post(event: Any, *, secret: str | None = None) -> int:
    """What nginx answers to an event that is signed, by default with the secret of the hook."""
    body = json.dumps(event).encode()
    key = secret or SECRETS.read_text().strip().partition("=")[2]
    digest = hmac.new(key.encode(), body, hashlib.sha256).hexdigest()
    headers = {"X-Hub-Signature-256": f"sha256={digest}", "X-GitHub-Event": "pull_request",
               "Content-Type": "application/json", "Host": HOST}  # fmt: skip
    own = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection("127.0.0.1", timeout=SECONDS, context=own)
    try:
        connection.request("POST", "/hooks/pull-request", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_whoever_has_the_secret_wakes_an_agent_and_nobody_else(service: Service) -> None:
    _sh(_BEFORE + _install())
    agent = service.run("followed", "cat", mode="turn")
    _sh(markdown_blocks(README, "Use")[0].replace("AGENT", agent.stem))
    main = systemctl("show", "--value", "--property", "MainPID", UNIT).strip()
    found = Path("/proc", main).stat()
    assert pwd.getpwuid(found.st_uid).pw_name == "ctxfs-hook"

    def told() -> list[str]:
        return [json.loads(line)["payload"] for line in read(agent, "out").splitlines()]

    wait_until(lambda: _post(EVENT) == 200, "an event is taken")
    wait_until(lambda: told() == [TOLD], "the agent is told")
    assert _post(EVENT, secret="another") == 403
    assert _post({**EVENT, "pad": "x" * (257 << 10)}) == 413
    # another daemon has another mount
    service.restart()
    assert _post(EVENT) == 200
    wait_until(lambda: told() == [TOLD] * 2, "the agent is told by the next daemon, too")
    # a crowd of them: as many as nginx lets pass are served at once
    begun = time.monotonic()
    with ThreadPoolExecutor(40) as crowd:
        answers = Counter(crowd.map(lambda _: _post(EVENT), range(40)))
    assert set(answers) == {200, 503}, "what comes too often is refused"
    taken = answers[200]
    assert taken <= 21 + time.monotonic() - begun
    wait_until(lambda: told() == [TOLD] * (2 + taken), "of nothing more is it told")
    systemctl("restart", UNIT)
    systemctl("stop", UNIT, "nginx")
