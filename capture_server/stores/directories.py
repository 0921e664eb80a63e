"""Directories whose names are on disk.

Invariant: after ``sync_name`` a crash does not take the directory away: its parent was synced by
this process, whoever made the directory, and so was the parent of every ancestor made here.
"""

from __future__ import annotations

from pathlib import Path

from capture_server.stores.filesystem import FileSystem


class Directories:
    """What one store made and synced. A race costs a second sync, nothing else."""

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._made: set[Path] = set()  # by this process, and not synced yet
        self._synced: set[Path] = set()

    def make(self, directory: Path) -> None:
        """See that it is there, its parents too."""
        try:
            self._fs.make_directory(directory)
        except FileExistsError:
            return
        except FileNotFoundError:
            if directory.parent == directory:
                raise
            self.make(directory.parent)
            self.make(directory)
            return
        self._synced.discard(directory)
        self._made.add(directory)

    def sync_name(self, directory: Path) -> None:
        """Return when its name is on disk, and the names of the parents that were made here."""
        if directory in self._synced and not self._made:
            return
        for each in (directory, *directory.parents):
            if each in self._made or (each == directory and each not in self._synced):
                self._fs.sync_directory(each.parent)
                self._made.discard(each)
        self._synced.add(directory)
