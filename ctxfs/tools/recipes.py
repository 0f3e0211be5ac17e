"""Recipes by which SpawnAgent makes agents: which there are, and what one says of an agent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import trio

from ctxfs import recipes
from ctxfs.recipes import Recipe
from ctxfs.tools.schemas import text
from ctxfs.tools.tool import Request, View, about
from runtime.errors import DeniedError, MissingError, UnsupportedError
from runtime.records.model import Agent
from runtime.texts import policy
from runtime.texts.names import parse_env_line, quote
from runtime.texts.policy import Rule

RECIPE: Final[View[Recipe]] = View(
    {
        "recipe": (text("its name, for SpawnAgent"), lambda _, recipe: recipe.name),
        "description": text("the first line of its README.md"),
    },
    {"lacks": text("why it cannot be used here")},
)


async def all_of(request: Request) -> list[Recipe]:
    """All that the machine has."""
    base = request.base
    trusted = {0, base.agents.privilege.uid}
    return await trio.to_thread.run_sync(
        partial(recipes.read, base.recipe_places, trusted=trusted)
    )


def may_use(request: Request, name: str) -> bool:
    """Whether the caller, or the parent that an operator names, may use a recipe."""
    agent = request.subject
    return agent is None or request.agents.authority.allows(agent, "recipe", name, "use")


async def named(request: Request) -> Recipe:
    """The recipe that is named; ``DeniedError``, ``MissingError`` or ``UnsupportedError``."""
    name = request.input["recipe"]
    if request.subject is not None and not may_use(request, name):
        raise DeniedError(
            f"recipe: recipe:{name} use is not in the effective policy of "
            f"{quote(request.subject.name)}; AgentList with recipes lists those that are"
        )
    found = next((each for each in await all_of(request) if each.name == name), None)
    if found is None:
        raise MissingError(f"recipe: no recipe {quote(name)}; AgentList with recipes lists them")
    if "placement" in request.input:
        found = found.at_node()
    if found.lacks:
        raise UnsupportedError(f"recipe: {quote(name)} cannot be used here: {found.lacks}")
    return found


def files_of(
    request: Request, recipe: Recipe, agent: Agent, parent: Agent | None
) -> Iterator[tuple[str, str]]:
    """The files of an agent that a recipe says, and what: no more than its parent can give."""
    bound = request.agents.authority.bound(agent)
    env = dict(map(parse_env_line, parent.env.splitlines())) if parent is not None else {}
    networks = recipe.networks
    if "placement" not in request.input:  # else they are those of the node
        known = request.agents.settings.config.networks
        networks = [name for name in recipe.networks if name in known]
    if not recipe.lacking_key(env):
        networks = [*networks, "default"]
    there = [
        name
        for name in networks
        if bound is None or bound.covers(Rule("allow", "network", name, "connect"))
    ]
    if recipe.networks and not there:
        key = recipe.lacking_key({})
        raise UnsupportedError(
            f"recipe: {quote(recipe.name)} needs network:{' or network:'.join(recipe.networks)}, "
            "configured and in the policy of its parent, or network:default there"
            + f", with {key} in the env of its parent" * bool(key)
        )
    network = there[0] if recipe.networks else ""
    keyed = network in ("", "default")
    for file, said in recipe.texts(agent.name, agent.label, network, env, keyed=keyed):
        if file == "policy" and bound is not None:
            with about("recipe"):
                rules = policy.parse(said, agent.label)
            yield file, policy.render(policy.effective(rules, bound), agent.label)
        # a home is of a name, and the next agent of a name that was made up is another one
        elif file != "homedir" or "name" in request.input:
            yield file, said
