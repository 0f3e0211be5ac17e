"""The command timeline: who ran when, who ended whom and why, in an agent's family."""

from __future__ import annotations

from client.arguments import JSON, NAME, Command, arg
from client.exits import FAILED, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments
    from client.root import Root


def do_timeline(root: Root, args: Arguments) -> int:
    """Show the lives of an agent and of its descendants."""
    try:
        from client.installed.chart import show_timeline
    except ModuleNotFoundError:
        message = "timeline needs the installed client, and this is the one of sandboxes"
        raise Failure(f"{message}; ctx events prints the events", FAILED) from None
    return show_timeline(root, args)


COMMANDS = (
    Command(
        "timeline",
        "show who ran when in a family, who ended whom and why",
        (
            JSON,
            arg("--svg", metavar="FILE", help="draw a picture; - stands for standard output"),
            arg("--all", action="store_true", help="a line for each agent, however many"),
            NAME,
        ),
        do_timeline,
        "Shows the last life of the agent, also of a removed one, and all lives below it.",
    ),
)
