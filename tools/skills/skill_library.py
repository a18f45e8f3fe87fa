"""The skills of an operator's folders: found, checked one by one, and read without leaving a skill's own folder.

A folder that is no skill is a fault with its reasons and stops no other. Names and descriptions are those of the start;
instructions and files are read anew each time. Symbolic links are never followed.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.skills.skill_format import FILE, MAX_BYTES, BadSkill, Skill, parse_skill

MAX_FILES = 1000  # of one skill
MAX_DEPTH = 8  # folders below a skill's
MAX_FILE_BYTES = 1 << 20  # of a file that a model reads
SCRIPTS = (".py", ".sh")  # endings of files that a sandbox can run


class UnknownSkill(LookupError):
    """There is no such skill, or no such file in it; the message names those there are."""


@dataclass(frozen=True, slots=True)
class SkillFault:
    """A folder that is no skill, and why."""

    folder: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SkillFile:
    """A file beside `SKILL.md`, by its path below the skill's folder, with slashes. `size`: bytes."""

    path: str
    size: int

    @property
    def is_script(self) -> bool:
        """Returns whether it is a program that a sandbox can run: Python, or a shell's."""
        return self.path.endswith(SCRIPTS)


def load_skill(folder: Path) -> Skill:
    """Reads the skill of a folder.

    Raises:
        BadSkill: it is none, or is not called as its folder.
    """
    try:
        skill = parse_skill(_content(folder / FILE, MAX_BYTES))
    except FileNotFoundError:
        raise BadSkill(f"There is no {FILE}; accepted: a folder with one.") from None
    except OSError as error:
        raise BadSkill(f"{FILE} cannot be read: {error.strerror or error}; accepted: a regular file.") from None
    own = folder.resolve().name
    if skill.name != own:
        raise BadSkill(f"name is {skill.name!r} and the folder is called {own!r:.80}; accepted: the same name.")
    list(_files(folder))
    return skill


class SkillLibrary:
    """Skills by name, in the order of their names. `faults` has the folders that are none."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        """Each of `folders` is a skill, or has skills in it. Of two skills of one name the first is kept."""
        self.faults = list[SkillFault]()
        found = dict[str, tuple[Skill, Path]]()
        for folder in [each for given in folders for each in self._candidates(given.expanduser())]:
            try:
                skill = load_skill(folder)
                if skill.name in found:
                    taken = found[skill.name][1]
                    raise BadSkill(f"The name {skill.name!r} is taken by {taken}; accepted: another name.")
            except BadSkill as bad:
                self.faults.append(SkillFault(str(folder), bad.problems))
                continue
            found[skill.name] = skill, folder.resolve()
        self._found = dict(sorted(found.items()))

    def _candidates(self, folder: Path) -> list[Path]:
        try:
            if (folder / FILE).exists():
                return [folder]
            inside = sorted(each for each in folder.iterdir() if not each.name.startswith(".") and each.is_dir())
        except OSError as error:
            reason = f"It cannot be read: {error.strerror or error}; accepted: a folder with skills."
            self.faults.append(SkillFault(str(folder), (reason,)))
            return []
        for link in [each for each in inside if each.is_symlink()]:
            reason = "It is a symbolic link, which is not followed; accepted: a folder, or the link's target by itself."
            self.faults.append(SkillFault(str(link), (reason,)))
        real = [each for each in inside if not each.is_symlink()]
        if not inside:
            reason = f"There is no {FILE} in it, nor any folder; accepted: a skill, or a folder with skills."
            self.faults.append(SkillFault(str(folder), (reason,)))
        return real

    def __iter__(self) -> Iterator[Skill]:
        return iter(skill for skill, _ in self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    @property
    def names(self) -> list[str]:
        return list(self._found)

    def chosen(self, names: Iterable[str]) -> list[Skill]:
        """The skills of these names, in the order of names, so that a prompt repeats.

        Raises:
            UnknownSkill: there is none of a name.
        """
        wanted = set(names)
        for name in sorted(wanted):
            self._folder(name)
        return [skill for skill in self if skill.name in wanted]

    def read(self, name: str) -> Skill:
        """The skill with its instructions as they are now.

        Raises:
            UnknownSkill: there is no such skill.
            BadSkill: its file is broken by now.
        """
        return load_skill(self._folder(name))

    def files(self, name: str) -> list[SkillFile]:
        """The regular files beside `SKILL.md`, in the order of their paths.

        Raises:
            UnknownSkill: there is no such skill.
            BadSkill: there are too many files.
        """
        return list(_files(self._folder(name)))

    def text(self, name: str, path: str) -> str:
        """The text of a file, `SKILL.md` among them.

        Raises:
            UnknownSkill: there is no such skill, or no such file in its folder.
            BadSkill: it is too large, or no text.
        """
        folder = self._folder(name)
        known = [each.path for each in self.files(name)]
        if path not in (FILE, *known):
            raise UnknownSkill(f"{name} has no file {path!r:.100}; accepted: {', '.join([FILE, *known[:40]])}.")
        try:
            content = _content(folder / path, MAX_FILE_BYTES)
        except OSError as error:
            raise UnknownSkill(f"{path} of {name} cannot be read: {error.strerror or error}.") from None
        if len(content) > MAX_FILE_BYTES:
            raise BadSkill(f"{path} has more than {MAX_FILE_BYTES} bytes; accepted: at most that.")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise BadSkill(f"{path} is no text ({len(content)} bytes); accepted: a file in UTF-8.")
        return text.replace("\r\n", "\n")

    def packed(self, name: str, max_bytes: int) -> bytes:
        """The folder's files as a ZIP archive, for a place that cannot see the folder.

        Raises:
            UnknownSkill: there is no such skill.
            BadSkill: its files are more than `max_bytes`, packed or not packed 4 times as much.
        """
        folder, packed, total = self._folder(name), io.BytesIO(), 0
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in [FILE, *(each.path for each in self.files(name))]:
                try:
                    content = _content(folder / path, 4 * max_bytes)
                except OSError as error:
                    raise BadSkill(f"{path} of {name} cannot be read: {error.strerror or error}.") from None
                total += len(content)
                if total > 4 * max_bytes:
                    raise BadSkill(f"The files of {name} have more than {4 * max_bytes} bytes; accepted: at most that.")
                archive.writestr(path, content)
        if packed.tell() > max_bytes:
            raise BadSkill(f"The files of {name} have {packed.tell()} bytes packed; accepted: at most {max_bytes}.")
        return packed.getvalue()

    def _folder(self, name: str) -> Path:
        if name not in self._found:
            raise UnknownSkill(f"There is no skill {name!r:.70}; accepted: {', '.join(self._found) or 'none, yet'}.")
        return self._found[name][1]


def _files(folder: Path) -> Iterator[SkillFile]:
    """Yields a skill's regular files but for `SKILL.md`, hidden ones and links.

    Raises:
        BadSkill: there are too many, or they lie too deep.
    """
    count = 0
    for place, folders, files in os.walk(folder, followlinks=False):
        below = Path(place).relative_to(folder).parts
        folders[:] = sorted(
            each for each in folders if not each.startswith(".") and not (Path(place) / each).is_symlink()
        )
        if folders and len(below) >= MAX_DEPTH:
            raise BadSkill(f"Its folders are nested deeper than {MAX_DEPTH}; accepted: at most that.")
        for file in sorted(files):
            status = (Path(place) / file).lstat()
            path = "/".join([*below, file])
            if file.startswith(".") or path == FILE or not stat.S_ISREG(status.st_mode):
                continue
            count += 1
            if count > MAX_FILES:
                raise BadSkill(f"It has more than {MAX_FILES} files; accepted: at most that.")
            yield SkillFile(path, status.st_size)


def _content(path: Path, most: int) -> bytes:
    """Reads up to one byte more than `most` of a regular file.

    Raises:
        OSError: it is a link, no regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "it is no regular file")
        return file.read(most + 1)
