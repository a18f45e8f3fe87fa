"""Skills for a model: their names and descriptions in a tool's own description, the rest read when it is needed.

The list stands with the tools at the beginning of a prompt and is the same for the same skills, so that its K/V is used
again. Scripts run in the sandbox, on a copy of the skill's folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ponder import Context, Retry, Tool, ToolError
from tools.builtin.python import attached
from tools.sandbox import Finished, Sandbox, SandboxFailed
from tools.skills import BadSkill, Skill, SkillLibrary, UnknownSkill

READ, RUN = "read_skill", "run_skill_script"
ORIGIN = "skills"
PART = 16_000  # characters of a file in one call
MAX_ARGUMENTS, MAX_ARGUMENT = 64, 4_000  # of a script: how many, and characters of one
SHOWN_FILES, SHOWN_CHARS = 3, 4_000  # files that a script made, and characters of each
_LISTED = 100  # files

_BOOTSTRAP = """import os, runpy, subprocess, sys, zipfile
root, script, arguments = {root!r}, {script!r}, {arguments!r}
zipfile.ZipFile({packed!r}).extractall(root)
os.remove({packed!r})
for place, folders, files in os.walk(root, topdown=False):
    for each in files:
        os.chmod(os.path.join(place, each), 0o444)
    os.chmod(place, 0o555)
path = os.path.join(root, script)
if script.endswith(".sh"):
    sys.exit(subprocess.run(["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", path, *arguments]).returncode)
sys.argv[:] = [path, *arguments]
sys.path.insert(0, os.path.dirname(path))
sys.dont_write_bytecode = True
_ = runpy.run_path(path, run_name="__main__")
"""
_PACKED = ".skill.zip"


def skill_tools(library: SkillLibrary, skills: Sequence[Skill], *, scripts: bool) -> list[Tool]:
    """Returns the tools of these skills, none without skills. `scripts`: whether there is a sandbox to run them in."""
    if not skills:
        return []
    names = [skill.name for skill in skills]
    named = {"type": "string", "enum": names, "description": "the skill."}
    listing = "\n".join(f"- {skill.name}: {skill.description}" for skill in skills)

    async def read(ctx: Context, arguments: Mapping[str, Any]) -> str:  # Any: JSON
        return await asyncio.to_thread(
            _read, library, arguments["name"], arguments.get("file"), arguments.get("start", 0)
        )

    async def run(ctx: Context, arguments: Mapping[str, Any]) -> str:  # Any: JSON
        return await _run(ctx, library, arguments["name"], arguments["script"], arguments.get("arguments", []))

    found = [
        Tool.from_schema(
            READ,
            "Read the instructions of a skill before you do what it is for, and then the files that they name. "
            f"Skills:\n{listing}",
            {
                "type": "object",
                "properties": {
                    "name": named,
                    "file": {"type": "string", "description": "a file of the skill; left out, its instructions."},
                    "start": {"type": "integer", "minimum": 0, "description": "the character to read on from."},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
            read,
            origin=ORIGIN,
            permission="none",  # the operator's own folders: instructions to be followed
            max_chars=PART + 8_000,  # with the list of files
        )
    ]
    if scripts:
        words = {"type": "string", "maxLength": MAX_ARGUMENT}
        found.append(
            Tool.from_schema(
                RUN,
                "Run a script of a skill, as its instructions say, in a fresh place without network; nothing is kept.",
                {
                    "type": "object",
                    "properties": {
                        "name": named,
                        "script": {"type": "string", "description": "a file of the skill, such as scripts/make.py."},
                        "arguments": {"type": "array", "items": words, "maxItems": MAX_ARGUMENTS},
                    },
                    "required": ["name", "script"],
                    "additionalProperties": False,
                },
                run,
                origin=ORIGIN,
                permission="execute",
                idempotent=True,  # nothing outlives it
                timeout=120,
            )
        )
    return found


def _read(library: SkillLibrary, name: str, file: str | None, start: int) -> str:
    try:
        skill = library.read(name)
        text = skill.body if file is None else library.text(name, file)
        beside = library.files(name) if file is None and not start else []
    except UnknownSkill as error:
        raise Retry(str(error)) from None
    except BadSkill as error:
        raise ToolError(str(error)) from None
    part = text[start : start + PART]
    if start >= len(text) > 0:
        raise Retry(f"The text ends at character {len(text)}; read from before it.")
    parts = [part or "(empty)"]
    if left := len(text) - start - len(part):
        parts.append(f"[{left:,} more characters: read on with start={start + len(part)}]")
    if skill.allowed_tools and file is None and not start:
        parts.append(f"It is written for these tools: {', '.join(skill.allowed_tools)}. Use what you have of the kind.")
    if beside:
        listed = "\n".join(f"- {each.path} ({each.size} bytes)" for each in beside[:_LISTED])
        more = f"\n- and {len(beside) - _LISTED} more" if len(beside) > _LISTED else ""
        parts.append(f"Files of this skill:\n{listed}{more}")
    return "\n\n".join(parts)


async def _run(ctx: Context, library: SkillLibrary, name: str, script: str, arguments: Sequence[str]) -> str:
    sandbox = ctx.get(Sandbox)
    try:
        programs = [each.path for each in await asyncio.to_thread(library.files, name) if each.is_script]
        if script not in programs:
            accepted = ", ".join(programs[:_LISTED]) or "none, for this skill has no script in Python or for a shell"
            raise Retry(f"{name} has no script {script!r:.100}; accepted: {accepted}.")
        packed = await asyncio.to_thread(library.packed, name, sandbox.config.file_bytes)
    except UnknownSkill as error:
        raise Retry(str(error)) from None
    except BadSkill as error:
        raise ToolError(str(error)) from None
    code = _BOOTSTRAP.format(root=f"/tmp/skills/{name}", script=script, arguments=list(arguments), packed=_PACKED)
    try:
        finished = await sandbox.run(code, files={_PACKED: packed}, timeout_s=60)
    except SandboxFailed as error:
        raise ToolError(str(error)) from None
    return "\n".join([attached(ctx, finished), *_made(finished)])


def _made(finished: Finished) -> list[str]:
    """Returns the first texts among the files that a script made, as a model reads them."""
    shown = list[str]()
    for name, content in finished.files.items():
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        if len(shown) < SHOWN_FILES and "\0" not in text:
            cut = "" if len(text) <= SHOWN_CHARS else f"\n… ({len(text) - SHOWN_CHARS} more characters)"
            shown.append(f"{name}:\n{text[:SHOWN_CHARS]}{cut}")
    return shown
