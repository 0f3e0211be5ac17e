"""Files and directories that callers have open, by the numbers that the kernel has, and the
charges for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ctxfs.files import folders
from ctxfs.filesystem import Filesystem
from ctxfs.tree.folders import FolderNode
from ctxfs.tree.nodes import MORE_SIZE, Call, Listing, Node, OpenFile, OpenGone
from ctxfs.tree.rownodes import FileNode, RowNode, reopen_row
from runtime.authority.accounts import Charge, Payer, Resource
from runtime.caller import Caller
from runtime.errors import CtxError
from runtime.kernel.handover import Descriptors, Handed, pack_caller, unpack_caller

log = logging.getLogger("ctxd.operations")

#: which of the charges of an open directory is that of its names
_OF_NAMES: Final = 1


class Opened(Handed):
    """Files and directories; who opened them pays as long as they are open."""

    HANDED = ("_next",)

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._runtime = fs.base.runtime
        self.files: dict[int, OpenFile] = {}
        self.listings: dict[int, Listing] = {}
        self.charges: dict[int, list[Charge]] = {}
        self._next = 1

    def by_whom(self, number: int) -> tuple[Caller, Node] | None:
        """The caller that opened a file or directory, and its node."""
        opened, listing = self.files.get(number), self.listings.get(number)
        if opened is not None:
            return opened.caller, opened.node
        return (listing.call.caller, listing.directory) if listing is not None else None

    def payer(self, number: int) -> Payer | None:
        """On whose account a file or directory is open."""
        charges = self.charges.get(number)
        return charges[0].payer if charges is not None else None

    def charge(self, caller: Caller, resource: Resource, amount: int) -> Charge:
        """So much on the account of the caller; ``QuotaError``."""
        who = self._runtime.agents.identity.payer(caller)
        return self._runtime.accounts.charged(who, resource, amount)

    @contextmanager
    def opening(self, caller: Caller) -> Iterator[Charge]:
        """The charge on its account if it can be opened; ``QuotaError``."""
        charge = self.charge(caller, Resource.DESCRIPTORS, 1)
        try:
            yield charge
        except BaseException:
            charge.release()
            raise

    @contextmanager
    def for_once(self, node: Node, call: Call) -> Iterator[OpenFile]:
        """A file, to write to it in one request."""
        with self.opening(call.caller) as charge:
            opened = node.open(call, os.O_WRONLY)
            try:
                yield opened
            finally:
                opened.release()
        charge.release()

    def add(self, opened: OpenFile | Listing, *charges: Charge) -> int:
        """Its number; of a directory, the second charge is that of its names."""
        self._next += 1
        self._put(self._next, opened, *charges)
        return self._next

    def _put(self, number: int, opened: OpenFile | Listing, *charges: Charge) -> None:
        if isinstance(opened, Listing):
            self.listings[number] = opened
        else:
            self.files[number] = opened
        self.charges[number] = list(charges)

    def close(self, number: int) -> None:
        for charge in self.charges.pop(number, ()):
            charge.release()
        self.listings.pop(number, None)
        opened = self.files.pop(number, None)
        if opened is not None:
            opened.release()

    def resized(self, number: int, listing: Listing) -> None:
        """A directory has other names than before."""
        self.charges[number][_OF_NAMES].resize(listing.size)

    def more(self, number: int, listing: Listing) -> bool:
        """Reads more names of a directory, once the account of who opened it has room for them;
        ``QuotaError`` before: the kernel would not get what the reply has then."""
        if listing.ended:
            return False
        self.charges[number][_OF_NAMES].resize(listing.size + MORE_SIZE)
        try:
            return listing.more()
        finally:
            self.resized(number, listing)

    # in the next daemon

    def save(self, descriptors: Descriptors) -> dict[str, Any]:
        """All that is open, and by whom, while no request is at hand."""
        files = [
            {**_facts(number, opened.node, opened.caller), "flags": opened.flags,
             **self._saved(opened, descriptors)}
            for number, opened in self.files.items()
        ]  # fmt: skip
        listings = [
            {**_facts(number, each.directory, each.call.caller), **each.save(descriptors)}
            for number, each in self.listings.items()
        ]
        return {**super().save(descriptors), "files": files, "listings": listings}

    def _saved(self, opened: OpenFile, descriptors: Descriptors) -> dict[str, Any]:
        if isinstance(opened.node, RowNode) and self._fs.is_gone(opened.node):
            text, unfinished = opened.last_text(), opened.unfinished
            return {"kind": OpenGone.__name__, "text": text, "unfinished": unfinished}
        return {"kind": type(opened).__name__, **opened.save(descriptors)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Before any request is read."""
        super().restore(saved)
        for each in saved["files"]:
            caller, node = unpack_caller(each["caller"]), self._node(each)
            opened = self._reopened(node, caller, each)
            opened.flags = each["flags"]
            charges = [self._charge_anyway(caller, Resource.DESCRIPTORS, 1)]
            if isinstance(opened, OpenGone):
                size = len(opened.last_text())
                charges.append(self._charge_anyway(caller, Resource.MEMORY, size))
            self._put(each["number"], opened, *charges)
        for each in saved["listings"]:
            caller = unpack_caller(each["caller"])
            listing = Listing(self._node(each), Call.of(self._runtime, caller))
            listing.restore(each)
            self._put(
                each["number"],
                listing,
                self._charge_anyway(caller, Resource.DESCRIPTORS, 1),
                self._charge_anyway(caller, Resource.MEMORY, listing.size),
            )

    def _node(self, saved: dict[str, Any]) -> Node:
        return self._fs.opened_before(saved["inode"], saved["path"])

    def _reopened(self, node: Node, caller: Caller, saved: dict[str, Any]) -> OpenFile:
        if isinstance(node, FolderNode) or "folder" in saved:
            found = self._fs.base.folders.reopened(node.inode, caller, saved, folders.ROWS)
            if found is not None:
                return found
        if isinstance(node, FileNode):
            try:
                return reopen_row(node, caller, saved["flags"], saved)
            except (CtxError, OSError, LookupError) as error:
                log.warning("%s cannot be taken over: %s", node.path, error)
        if "fd" in saved:
            os.close(saved["fd"])
        still = self._runtime.agents.identity.still
        unfinished = saved.get("unfinished", False)
        return OpenGone(node, caller, saved.get("text"), still, unfinished=unfinished)

    def _charge_anyway(self, caller: Caller, resource: Resource, amount: int) -> Charge:
        who = self._runtime.agents.identity.payer(caller)
        return self._runtime.accounts.charged_anyway(who, resource, amount)


def _facts(number: int, node: Node, caller: Caller) -> dict[str, Any]:
    """The facts that are saved of files and directories alike."""
    return {"number": number, "inode": node.inode, "path": node.path, "caller": pack_caller(caller)}
