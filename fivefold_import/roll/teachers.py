"""ROLL's teachers on the student's own samples, if there are several: each has the rows of some tags."""

from __future__ import annotations

from fivefold_import.draft import Draft
from fivefold_import.roll.rules import DOMAINS, TEACHER, has_teacher
from fivefold_import.settings import COEFF, ONE_TEACHER
from fivefold_import.values import DTYPE, number

MODEL = ".model_args.model_name_or_path"


def convert_teachers(draft: Draft) -> None:
    """Convert the section `teacher` if its keys begin with the names of teachers."""
    names = [key.removeprefix(TEACHER).removesuffix(MODEL) for key in draft.keys(f"{TEACHER}*{MODEL}")]
    if not has_teacher(draft) or not names:
        return
    sources = {name: _sources(draft, name) for name in names}
    weights = {draft.read(f"{TEACHER}{name}.opd_kl_coef", number, 1.0) for name in names}
    if None in sources.values() or len(weights) > 1 or _shares(list(sources.values())):
        for name in names:
            draft.unsupported(f"{TEACHER}{name}{MODEL}", ONE_TEACHER)
        draft.recipe.setdefault("teacher.path", draft.get(f"{TEACHER}{names[0]}{MODEL}"))
        return
    draft.recipe[COEFF] = weights.pop()
    for name in names:
        own, to = f"{TEACHER}{name}", f"teachers.{name}."
        draft.mapped(f"{own}{MODEL}", f"{to}path", draft.get(f"{own}{MODEL}"))
        draft.mapped(f"{own}.tag_included", f"{to}data_sources", sources[name], "the domains of the tags")
        draft.mapped(f"{own}.opd_kl_coef", COEFF, draft.recipe[COEFF])
        if draft.writes(dtype := f"{own}.model_args.dtype"):
            draft.mapped(dtype, f"{to}dtype", draft.read(dtype, DTYPE))


def _sources(draft: Draft, name: str) -> list[str] | None:
    """Return the data sources of a teacher's tags; None if they are not known, or other teachers have a part of one."""
    tags, domains = draft.get(f"{TEACHER}{name}.tag_included"), draft.recipe.get(DOMAINS, {})
    if not isinstance(tags, list) or not tags or any(str(tag) not in domains for tag in tags):
        return None
    found = sorted({domains[str(tag)] for tag in tags})
    whole = {tag for tag, domain in domains.items() if domain in found}
    return found if whole == {str(tag) for tag in tags} else None


def _shares(sources: list[list[str] | None]) -> bool:
    """Return whether two teachers have a data source in common."""
    every = [source for found in sources for source in found or []]
    return len(every) > len(set(every))
