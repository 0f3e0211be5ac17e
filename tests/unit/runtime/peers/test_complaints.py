"""What commands that lead to nodes complain of."""

from __future__ import annotations

import pytest

from runtime.peers.complaints import told


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("", ""),
        ("anything\nelse\n", "anything else"),
        ("a\x1b[31m", r"a\x1b[31m"),
        (
            "@@@@@\nHost key for n2 has changed and you have requested strict checking.\nfailed.\n",
            "Host key for n2 has changed and you have requested strict checking: it was installed "
            "anew, or somebody stands between; if you know why, remove the old key from "
            "/s/known_hosts",
        ),
        (
            "motd\nal@n2: Permission denied (publickey).\n",
            "al@n2: Permission denied (publickey): is there such a user? The key in /s is to be in "
            "authorized_keys of that one",
        ),
        *(
            (said, f"{said}: make that user there, or name another one in users of this node")
            for said in (
                "runuser: user al does not exist or the user entry does not contain all fields",
                "sudo: unknown user al",
                "unable to find user al: no matching entries in passwd file",
            )
        ),
        (
            "sh: 1: ctx: not found\n",
            "sh: 1: ctx: not found: install ctxfs there, or name its path in authorized_keys",
        ),
    ],
)
def test_what_is_known_has_a_cure(said: str, shown: str) -> None:
    assert told(said, "/s") == shown


def test_a_user_is_told_of_the_own_ssh() -> None:
    said = told("al@n2: Permission denied (publickey).\n", "")
    assert "SSH_AUTH_SOCK" in said and "IdentityAgent in ~/.ssh/config" in said
    said = told("No ED25519 host key is known for n2 and you\nHost key verification failed", "")
    assert said.endswith("compare it with the one there, and add it to ~/.ssh/known_hosts")
