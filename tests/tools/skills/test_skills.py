"""Skills are loaded as they are published; a folder that breaks the format is named and stops no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tools.skills.published import write, write_skills
from tools.skills import BadSkill, SkillLibrary, UnknownSkill, parse_skill
from tools.skills.skill_format import MAX_BYTES, MAX_DESCRIPTION
from tools.skills.skill_library import MAX_DEPTH, MAX_FILE_BYTES, MAX_FILES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_skills(tmp_path / "skills")


def test_published_skills_load_unchanged(folder: Path) -> None:
    library = SkillLibrary([folder])
    assert library.names == ["citing-sources", "commit-messages", "measuring-text"] and library.faults == []
    cite, commit, measure = library
    assert cite.description == 'Writes references: author, year, title. It\'s for "works cited".'
    assert cite.compatibility == "Needs nothing, not even a network" and cite.allowed_tools == ("Read", "Grep")
    assert cite.body == "Cite as Author (Year). *Title*."
    assert commit.description == "Writes commit messages. For git."
    assert commit.notes == ("version is no field of the format; it has no effect.",)
    assert measure.description.endswith("or whether it fits: a tweet, an abstract.") and measure.license == "Apache-2.0"
    assert measure.metadata == {"author": "ponder tests", "version": "1.10"}
    assert measure.allowed_tools == ("Bash(python scripts/*)", "Read") and measure.notes == ()
    assert [each.path for each in library.files("measuring-text")] == ["references/limits.md", "scripts/measure.py"]
    assert [each.path for each in library.files("commit-messages") if each.is_script] == ["tools/count.sh"]


def test_a_skills_own_folder_is_accepted_too(folder: Path) -> None:
    assert SkillLibrary([folder / "commit-messages"]).names == ["commit-messages"]


GOOD = "name: some-skill\ndescription: Does it.\n"


@pytest.mark.parametrize(
    ("front", "told"),
    [
        ("name: Some-Skill\ndescription: d", "'Some-Skill'; accepted: a-z, 0-9 and single hyphens"),
        ("name: -some\ndescription: d", "single hyphens between them"),
        ("name: some--skill\ndescription: d", "single hyphens between them"),
        (f"name: {'a' * 65}\ndescription: d", "65 characters; accepted: at most 64"),
        ("name: other-skill\ndescription: d", "the folder is called 'some-skill'; accepted: the same name"),
        ("description: d", "name is missing; accepted: 1 to 64"),
        ("name: some-skill", "description is missing; accepted: 1 to 1024"),
        ("name: some-skill\ndescription:", "description is empty"),
        (f"name: some-skill\ndescription: {'d' * (MAX_DESCRIPTION + 1)}", "1025 characters; accepted: at most 1024"),
        ("name: some-skill\ndescription: [a, b]", "description is a list; accepted: a text"),
        ("name: some-skill\ndescription: use it: always", "mapping values.*(line 3 of SKILL.md).*quote a text"),
        ('name: some-skill\ndescription: "a\\u202eb"', "U+202E, which does not show"),
        (f"{GOOD}name: again", "'name' twice; accepted: each field once"),
        (f"{GOOD}metadata: [a]", "metadata is no map"),
        (f"{GOOD}compatibility: {'c' * 501}", "501 characters; accepted: at most 500"),
        (f"{GOOD}allowed-tools: {{a: b}}", "allowed-tools is no list of names"),
        (f"{GOOD}license: {{a: b}}", "license is a mapping; accepted: a text"),
        ("- name", "is no mapping; accepted: lines such as name: my-skill"),
        ("name: &a some-skill\ndescription: *a", "the alias *a; accepted: values written out"),
        (f"{GOOD}x: !!python/object/apply:os.system [echo]", "is not YAML: could not determine a constructor"),
        (f"{GOOD}x: {'[' * 4000}", "is not YAML"),
        (f"{GOOD}x: {'y' * 17_000}", "front matter has 17044 characters; accepted: at most 16384"),
    ],
)
def test_a_broken_folder_is_named_with_what_is_accepted(folder: Path, front: str, told: str) -> None:
    write(folder / "some-skill" / "SKILL.md", f"---\n{front}\n---\nbody")
    library = SkillLibrary([folder])
    (fault,) = library.faults
    assert fault.folder == str(folder / "some-skill") and len(library) == 3
    parts = " ".join(fault.problems)
    assert all(part in parts for part in told.split(".*")), parts


def test_all_problems_of_a_file_are_told_at_once() -> None:
    with pytest.raises(BadSkill) as told:
        parse_skill(b"---\nname: A\nmetadata: b\n---\n")
    assert len(told.value.problems) == 3


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"# No front matter", "does not begin with a line ---"),
        (b"---\nname: a\n", "has no second line ---"),
        (b"---\nname: \xff\n---\n", "is not UTF-8 (byte 10)"),
        (b"---\n" + b"x" * MAX_BYTES, "accepted: at most 262144"),
        (b"", "does not begin"),
    ],
)
def test_a_file_that_is_no_skill_is_refused(content: bytes, told: str) -> None:
    with pytest.raises(BadSkill) as refused:
        parse_skill(content)
    assert told in str(refused.value)


def test_of_two_of_one_name_the_first_stays(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "more" / "commit-messages" / "SKILL.md", "---\nname: commit-messages\ndescription: other\n---\n")
    library = SkillLibrary([folder, tmp_path / "more"])
    assert library.chosen(["commit-messages"])[0].description == "Writes commit messages. For git."
    assert "is taken by" in library.faults[0].problems[0]


def test_folders_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "some" / "x" / "README.md", "no skill")
    library = SkillLibrary([tmp_path / "empty", tmp_path / "missing", tmp_path / "some"])
    assert [each.folder for each in library.faults] == [
        str(tmp_path / "empty"),
        str(tmp_path / "missing"),
        str(tmp_path / "some" / "x"),
    ]
    assert "There is no SKILL.md" in library.faults[2].problems[0]


@pytest.mark.parametrize(
    "path",
    [
        "../citing-sources/SKILL.md", "/etc/passwd", "references/../../x", "link.md", "linked/x.md",
        "pipe", ".hidden", "", ".", "references", "references//limits.md", "references\\limits.md", "\0",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_a_skill(folder: Path, path: str) -> None:
    own = folder / "measuring-text"
    (own / "link.md").symlink_to("/etc/passwd")
    write(folder.parent / "outside" / "x.md", "secret")
    (own / "linked").symlink_to(folder.parent / "outside")
    os.mkfifo(own / "pipe")
    write(own / ".hidden", "secret")
    library = SkillLibrary([folder])
    assert [each.path for each in library.files("measuring-text")] == ["references/limits.md", "scripts/measure.py"]
    with pytest.raises(UnknownSkill, match="accepted: SKILL.md, references/limits.md, scripts/measure.py"):
        library.text("measuring-text", path)


def test_links_to_skills_and_of_skill_md_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "linked").symlink_to(folder / "citing-sources")
    (folder / "inner").mkdir()
    (folder / "inner" / "SKILL.md").symlink_to(folder / "citing-sources" / "SKILL.md")
    problems = {Path(each.folder).name: " ".join(each.problems) for each in SkillLibrary([folder]).faults}
    assert "symbolic link, which is not followed" in problems["linked"]
    assert "cannot be read" in problems["inner"] and "a regular file" in problems["inner"]
    (tmp_path / "alias").symlink_to(folder)  # the operator's own argument may be one
    assert len(SkillLibrary([tmp_path / "alias"])) == 3


def test_files_are_texts_of_a_size(folder: Path) -> None:
    library = SkillLibrary([folder])
    with pytest.raises(BadSkill, match="is no text"):
        library.text("citing-sources", "assets/logo.png")
    write(folder / "citing-sources" / "long.txt", "x" * (MAX_FILE_BYTES + 1))
    with pytest.raises(BadSkill, match="accepted: at most that"):
        library.text("citing-sources", "long.txt")
    write(folder / "citing-sources" / "new.txt", "\ufeffa\r\nb")  # added after the start
    assert library.text("citing-sources", "new.txt") == "a\nb"


def test_folders_of_too_many_files_or_too_deep_are_refused(folder: Path) -> None:
    for number in range(MAX_FILES + 1):
        (folder / "citing-sources" / f"{number}.txt").touch()
    write(folder.joinpath("commit-messages", *"abcdefghi") / "x.txt", "")
    problems = {Path(each.folder).name: each.problems[0] for each in SkillLibrary([folder]).faults}
    assert problems == {
        "citing-sources": f"It has more than {MAX_FILES} files; accepted: at most that.",
        "commit-messages": f"Its folders are nested deeper than {MAX_DEPTH}; accepted: at most that.",
    }


def test_what_is_packed_has_a_limit(folder: Path) -> None:
    library = SkillLibrary([folder])
    assert library.packed("measuring-text", 10_000).startswith(b"PK")
    with pytest.raises(BadSkill, match="packed; accepted: at most 500"):
        library.packed("measuring-text", 500)
    write(folder / "measuring-text" / "zeros.txt", "0" * 50_000)  # packs to little, and is much where it is unpacked
    with pytest.raises(BadSkill, match="more than 40000 bytes"):
        library.packed("measuring-text", 10_000)
