"""An agent's label and policy, as rows; runtime/texts/policy.py parses the lines."""

from __future__ import annotations

import re
from typing import Final

from ctxfs.files import fields
from ctxfs.tree import shapes
from ctxfs.tree.base import Base
from ctxfs.tree.rows import NOT_TERMINAL, Control, Row, Shown
from runtime.authority.guard import Guard
from runtime.caller import CONTROLLERS, Caller
from runtime.errors import MalformedError, QuotaError, WrongStateError
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.texts import policy
from runtime.texts.names import quote
from runtime.texts.policy import Rules

_LABEL: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._+-]{0,63}")


def _check_label(line: str, _: str = "") -> str:
    if not _LABEL.fullmatch(line):
        raise MalformedError(f"{quote(line)} is not a label: up to 64 letters, digits and . _ + -")
    return line


def _set_label(base: Base, agent: Agent, label: str) -> None:
    rewritten = policy.relabel(agent.policy, agent.label, label)
    base.agents.journal.update(agent, label=label, policy=rewritten)


class _PolicyCheck:
    """Takes a policy as it is written, some lines after the others: each is read once."""

    def __init__(self, base: Base, agent: Agent, caller: Caller) -> None:
        self._authority = base.agents.authority
        self._agent = agent
        self._may_delegate = caller.agent is None
        self._lines = 0
        #: what needs a line of its own: kind, class and object
        self._said: set[tuple[str, str, str]] = set()

    def take(self, text: str) -> Rules:
        """The rules of more lines; ``MalformedError``, ``QuotaError``, ``ExceedingError`` or
        ``WrongStateError``."""
        agent = self._agent
        rules = policy.parse(
            text, agent.label, may_delegate=self._may_delegate, before=self._lines
        )
        present = self._authority.own_policy(agent)
        self._said |= {(rule.kind, rule.cls, rule.object) for rule in rules}
        if len(self._said) > max(policy.LINES_MAX, present.lines):
            raise QuotaError(
                f"the policy would have {len(self._said)} different lines; at most "
                f"{max(policy.LINES_MAX, present.lines)}: "
                "name several objects by a prefix, as in agent:rev-*"
            )
        self._authority.check_policy(agent, rules)
        if agent.status is not Status.NEW:
            for rule in rules:
                if not present.covers_as(rule):
                    raise WrongStateError(
                        f"{rule.cls}:{rule.object} {rule.perm} would extend the policy, "
                        "which is possible only while the agent is new"
                    )
        self._lines += text.removesuffix("\n").count("\n") + 1
        return rules


def _set_policy(base: Base, agent: Agent, caller: Caller, text: str) -> None:
    rules = _PolicyCheck(base, agent, caller).take(text)
    authority = base.agents.authority
    authority.check_taking(agent, rules)
    keys = {rule.key for rule in rules}
    # Whoever writes the text anew leaves what is there as it was: only the rules that
    # root adds are root's, those of root that another leaves in stay root's.
    kept = keys & set(agent.policy_of_root)
    if caller.agent is None and caller.uid == 0:
        kept |= keys - {rule.key for rule in authority.own_policy(agent)}
    policy_of_root = tuple(sorted(kept))
    base.agents.journal.update(agent, policy=fields.ended(text), policy_of_root=policy_of_root)


ROWS: Final[tuple[Row[Agent], ...]] = (
    fields.single("label", "the label of its policy lines", fields.alone(_check_label),
                  shape=shapes.word(_check_label), default="NAME_t", update=_set_label),
    Control(name="policy", default="configured; a child's from its parent",
        shape=shapes.lines(policy.parse),
        guard=Guard(who=CONTROLLERS, when=NOT_TERMINAL), render=fields.text("policy"),
        checking=_PolicyCheck, commit=_set_policy,
        doc="its authority: allow LABEL CLASS:OBJECT PERM[,PERM...], at most 256 "
        "lines; can be extended only while new"),
    Shown(name="policy.effective", instead="policy", generated=True,
        render=lambda base, agent, caller: policy.render(
            base.agents.authority.effective_policy(agent), agent.label
        ),
        doc="its policy, as far as its parent's effective policy permits"),
)
