"""Placed agents of an ordinary user, whose own ssh leads to a ctxd of the same user (the rest is in
tests/nodes/test_users.py)."""

from __future__ import annotations

from tests.worlds.daemon import end_process, read, wait_dead, wait_status, wait_until, write
from tests.worlds.nodes import PARENT
from tests.worlds.ordinary import UID
from tests.worlds.users import users


def test_a_user_places_agents_by_the_own_ssh() -> None:
    """The child of an agent ends with it."""
    with users() as both:
        status, said = both.ctx("nodes", "check", "n2")
        assert status == 0 and "two runs ctxd" in said, said
        program = ("sh", "-c", "cat; id -u; exit 3")
        status, said = both.ctx("run", "once", "--node", "n2", "--message", "hi", "--", *program)
        assert status == 3 and said.startswith(f"hi\n{UID}\n"), said

        def begin() -> int:
            boss = both.here.make("boss")
            write(boss / "policy", "".join(
                f"allow boss_t {each}\n"
                for each in ("agent:* create", "tool:* execute", "node:n2 place")
            ))  # fmt: skip
            write(boss / "exec", f"sh -c '{PARENT.format('kid')}'")
            write(boss / "ctl", "start")
            wait_until(both.here.agent_dir("kid").exists, "it is made")
            wait_status(both.here.agent_dir("kid"), "busy")
            return int(read(boss, "pid"))

        pid = both.here.do(begin)
        kid = both.here.agent_dir("kid")
        assert both.left(kid)
        end_process(pid)
        both.gone(kid)
        both.here.do(lambda: wait_dead(both.here.agent_dir("boss")))
        assert both.end(kid) == ("cancelled", "parent_dead")
