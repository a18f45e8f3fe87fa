"""Skills: folders of instructions, references and scripts in the Agent Skills format, read on demand by a model.

Knows nothing of models, prompts or sandboxes.
"""

from tools.skills.skill_format import BadSkill, Skill, parse_skill
from tools.skills.skill_library import SkillFault, SkillFile, SkillLibrary, UnknownSkill, load_skill

__all__ = [
    "BadSkill",
    "Skill",
    "SkillFault",
    "SkillFile",
    "SkillLibrary",
    "UnknownSkill",
    "load_skill",
    "parse_skill",
]
