"""Real command lines as agents: where they are installed, and from what."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

#: git ignores it
DIRECTORY: Final = Path(__file__).resolve().parents[2] / ".clients"
#: the programs alone, as a user has them in the PATH
BIN: Final = DIRECTORY / "bin"
#: of the programs, the platform's package where there is one: it holds the program
PACKAGES: Final = {
    "@anthropic-ai/claude-code-linux-{0}": "2.1.331",
    "@openai/codex-linux-{0}": "npm:@openai/codex@0.169.0-linux-{0}",
    "@google/gemini-cli": "0.61.0",
    # agents of the Agent Client Protocol, which run the first two, and the protocol's own library
    "@agentclientprotocol/claude-agent-acp": "0.101.0",
    "@agentclientprotocol/codex-acp": "2.6.0",
    "@agentclientprotocol/sdk": "2.4.0",
}
MODULES: Final = DIRECTORY / "node_modules"
_CODEX: Final = {"x64": "x86_64-unknown-linux-musl", "arm64": "aarch64-unknown-linux-musl"}


def machine() -> str:
    """This one, as npm calls it."""
    return {"aarch64": "arm64"}.get(platform.machine(), "x64")


PROGRAMS: Final = {
    "claude": "@anthropic-ai/claude-code-linux-{0}/claude",
    "codex": f"@openai/codex-linux-{{0}}/vendor/{_CODEX[machine()]}/bin/codex",
    "gemini": "@google/gemini-cli/bundle/gemini.js",
    "codex-acp": "@agentclientprotocol/codex-acp/dist/index.js",
}
