"""An agent that is exported, removed and declared again is what it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client.export import Exported
from client.root import Root
from ctxfs.declared import SHAPES
from ctxfs.declaring import Declaring
from tests.worlds.tree import Mounted

EXAMPLES = int(os.environ.get("CTXFS_TEST_EXAMPLES", "10"))
_WORD = st.text(st.characters(min_codepoint=33, blacklist_categories=["Cs", "Cc"],
                              blacklist_characters="/'\"\\"), min_size=1, max_size=12)
_PATH = st.lists(_WORD.filter(lambda w: w not in (".", "..")), min_size=1, max_size=3).map(
    lambda parts: "/" + "/".join(parts))
_SOURCE = _PATH.filter(lambda path: not path.startswith(("/proc", "/cg")))
_LINE = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\0"))
_TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
_KEY = st.from_regex(r"[A-BD-Z_][A-Z0-9_]{0,5}", fullmatch=True)
_IDS = st.integers(1, 2**32 - 2)
_POLICY = st.sampled_from([
    "allow LABEL agent:rev-* create,start", "delegate LABEL tool:* execute", "# why, and: how",
    "allow LABEL model:* use", "", "  allow LABEL network:default connect",
])  # fmt: skip
_OBJECT = st.dictionaries(_LINE, st.none() | st.booleans() | st.integers(-2**60, 2**60) | _LINE,
                          max_size=3)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def listed(lines: st.SearchStrategy[str], **more: Any) -> st.SearchStrategy[str]:
    return st.lists(lines, max_size=4, **more).map(lambda all_: "".join(f"{x}\n" for x in all_))


def mapped(keys: st.SearchStrategy[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    return st.dictionaries(keys, values, max_size=4).map(
        lambda found: "".join(f"{key}={value}\n" for key, value in found.items()))


#: what an operator may write to a new root agent
FILES: dict[str, st.SearchStrategy[str]] = {
    "uid": _IDS.map(str),
    "gid": _IDS.map(str),
    "groups": listed(_IDS.map(str)),
    "label": st.from_regex(r"[a-z0-9][a-z0-9._+-]{0,9}", fullmatch=True),
    "policy": listed(_POLICY),
    "mount": listed(
        _SOURCE.map("{0}\t/t{0}\tro".format),
        unique=True),
    "root": st.just("") | _SOURCE,
    "iso": st.sampled_from(["sandbox", "shared"]),
    "workspace": st.sampled_from(["inherit", "explicit_root:/a b: c"]),
    "cwd": st.just("") | _PATH,
    "env": mapped(_KEY, _LINE),
    "path": listed(_PATH.filter(lambda path: ":" not in path)),
    "exec": _PATH.map("run {} '#: a' $'b\\n\\xff\\'c'".format),
    "mode": st.sampled_from(["once", "turn", "resident"]),
    "tty": st.sampled_from(["", "80x24"]),
    "placement": st.just(""),
    "homedir": st.sampled_from(["private", "durable"]),
    "author": st.sampled_from(["", "Ann Lee <ann@example.org>"]),
    "limits": mapped(
        st.sampled_from(["memory.max", "pids.max", "log_max", "net.api.max"]),
        st.integers(1, 2**40),
    ),
    "restart": st.sampled_from(["no", "on-failure", "always"]),
    "meta.json": _OBJECT.map(dumped),
    "handoff.md": _TEXT,
    "input.jsonl": listed(_OBJECT.map(dumped)),
}  # fmt: skip


class TreeRoot:
    """The tree for the client, without a mount."""

    def __init__(self, mounted: Mounted) -> None:
        self.mounted = mounted

    def read(self, relative: str) -> bytes:
        return self.mounted.get(relative).encode()

    def value(self, relative: str) -> str:
        return self.mounted.get(relative).rstrip("\n")

    def join(self, relative: str) -> str:
        return f"/ctx/{relative}"


def all_of(mounted: Mounted) -> dict[str, Any]:
    """Each file, of JSON what it says."""
    found: dict[str, Any] = {}
    for file, shape in SHAPES.items():
        text = mounted.get(f"agent/coder.d/{file}")
        found[file] = text
        if shape.form.startswith("json"):
            found[file] = [json.loads(line) for line in text.split("\n") if line]
    return found


def test_every_file_of_a_root_agent_is_tried() -> None:
    # who its parent is, and whose it is, does not change by what its files say
    others = {"parent", "life", "profile", "owner", "context", "model"}
    assert FILES.keys() | others == SHAPES.keys()


def fitting(files: dict[str, str]) -> dict[str, str]:
    """Without what does not go together."""
    if files.get("mode", "once") == "once":
        return files
    return {file: text for file, text in files.items() if file != "tty"}


def take_away(mounted: Mounted) -> None:
    made = mounted.agents.registry.named("coder")
    if made is not None:
        mounted.agents.removals.unmake(made)


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.fixed_dictionaries({}, optional=FILES).map(fitting))
def test_what_is_exported_and_declared_is_the_same(
    mounted: Mounted, tmp_path: Path, files: dict[str, str]
) -> None:
    directory = tmp_path / "agents.d"
    directory.mkdir(mode=0o755, exist_ok=True)
    take_away(mounted)
    mounted.make("coder")
    for file in SHAPES:
        if files.get(file):
            label = files.get("label", "coder_t")
            mounted.put(f"agent/coder.d/{file}", files[file].replace("LABEL", label))
    before = all_of(mounted)
    text = Exported(cast(Root, TreeRoot(mounted)), "coder").yaml()
    take_away(mounted)
    (directory / "coder.yaml").write_text(text)
    (directory / "coder.yaml").chmod(0o644)
    trio.run(lambda: Declaring(mounted.fs, directory).read(booting=True))
    assert mounted.agents.registry.named("coder") is not None, text
    assert all_of(mounted) == before, text
