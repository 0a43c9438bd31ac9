"""ROLL's tables, and the rules of single keys that take more than a lookup."""

from __future__ import annotations

from fivefold_import import megatron, reasons
from fivefold_import.agents import has_turns
from fivefold_import.algorithms import choose_loss
from fivefold_import.critic import of_critic
from fivefold_import.draft import Draft
from fivefold_import.roll import agents
from fivefold_import.settings import COEFF, trackers
from fivefold_import.tables import read_tables
from fivefold_import.values import flag, number, whole

TRAIN, INFER, REF, CRITIC, TEACHER = "actor_train.", "actor_infer.", "reference.", "critic.", "teacher."
CONFIG = "strategy_args.strategy_config."
GENERATING, HELD_OUT = INFER + "generating_args.", "validation.generating_args."
DOMAINS = "train_dataset.reader_kwargs.domains"
"""The recipe's key of what the tags of rows are called as data sources."""
PURE, MIXED, WEIGHT = "is_pure_opd", "use_opd", "opd_kl_coef"
"""Switches of on-policy distillation, without rewards and together with them, and its weight with rewards."""


NEVER_TRAINED = frozenset({"vision_model", "model.visual", "visual", "audio_model", "talker", "code2wav"})
"""Modules of models that read more than text, by their names in Megatron-Core and in Hugging Face's files."""
_THRESHOLDS = (("low", 0.1), ("high", 0.95))
"""Mean rewards of a prompt's responses between which `difficulty_mask` keeps it, by their defaults."""


def has_teacher(draft: Draft, *_: str) -> bool:
    """Return whether the source distils from a teacher on the student's own samples."""
    return True in (draft.get(PURE), draft.get(MIXED))


def _mixed_with_rewards(draft: Draft, source: str) -> None:
    draft.mapped(source, COEFF, draft.read(WEIGHT, number, 1.0), "in addition to the rewards")


def _weight_of_teacher(draft: Draft, source: str) -> None:
    if draft.get(MIXED) is True:
        draft.mapped(source, COEFF, number(draft.get(source)))
    draft.implied(source, "without rewards, the teacher's weight is 1")


def _tracker(draft: Draft, source: str) -> None:
    if draft.get(source) == "ml_tracker":
        draft.implied(source, f"ROLL's public code has no such tracker either: {reasons.METRICS}")
    trackers(draft, source)


def _frozen_modules(draft: Draft, source: str) -> None:
    """Report modules that are not trained: what reads images and speaks never is."""
    value = draft.get(source)
    modules = [part.strip() for part in value.split(",")] if isinstance(value, str) else value or []
    if not modules:
        draft.implied(source, "it is switched off")
    elif {str(module) for module in modules} <= NEVER_TRAINED:
        draft.implied(source, "what reads images or sound is never trained")
    draft.unsupported(source, "name the weights as the Hugging Face files do, in actor.freeze")


def _template_of_tag(draft: Draft, source: str) -> None:
    """Report the chat template of a tag's rows: there is one for all."""
    if len({str(draft.get(key)) for key in draft.keys("tag_to_template.*")}) == 1:
        draft.implied(source, reasons.TEMPLATE)
    draft.unsupported(source, "all rows have the tokenizer's chat template, or chat_template")


def _by_difficulty(draft: Draft, source: str) -> None:
    if draft.get(source) is True:
        note = "rows have the difficulty, a number from 0 to 1, in the column extra_info"
        draft.mapped(source, "actor.sample_weights.difficulty_key", "difficulty", note)
    draft.implied(source, "it is switched off")


def _difficulty_mask(draft: Draft, source: str) -> None:
    """Convert the switch that leaves prompts out of training which are too easy or too hard."""
    if draft.get(source) is not True:
        return draft.implied(source, "it is switched off")
    low, high = (draft.read(f"difficulty_{side}_threshold", number, otherwise) for side, otherwise in _THRESHOLDS)
    draft.recipe["actor.group_mean_below"] = high
    if DOMAINS in draft.recipe:
        draft.recipe["actor.group_mean_of"] = "accuracy"
        draft.notes.append(
            "actor.group_mean_of=accuracy: difficulty_mask counts right answers, and not the rewards that penalties "
            "change; a right choice without a box counts here only if it has the full reward"
        )
    return draft.mapped(source, "actor.group_mean_above", low, f"and actor.group_mean_below={high:g}")


def _threshold(draft: Draft, source: str) -> None:
    if draft.get("difficulty_mask") is True:
        key = "actor.group_mean_above" if "low" in source else "actor.group_mean_below"
        draft.mapped(source, key, number(draft.get(source)))
    draft.implied(source, "only difficulty_mask reads this")


def _variant(draft: Draft, source: str) -> None:
    """Convert the variant of the policy gradient; `vanilla` has no ratios, `tis` truncates them to [0, 1]."""
    variant = str(draft.get(source))
    match variant:
        case "tis":
            draft.mapped(source, "actor.loss", "cispo", "with weights in [0, 1]")
        case "ppo":
            draft.implied(source, reasons.CLIPPED_LOSS)
        case _:
            choose_loss(draft, source, "pg" if variant == "vanilla" else variant)


def _steps(draft: Draft, source: str) -> None:
    """Convert the number of steps; 0 and negative numbers leave the length to the epochs."""
    if whole(draft.get(source)) > 0:
        draft.mapped(source, "total_train_steps", whole(draft.get(source)))
    draft.implied(source, "the epochs say how long training is")


def _ipo(draft: Draft, source: str) -> None:
    if flag(draft.get(source)):
        draft.mapped(source, "actor.loss_type", "ipo")
    draft.implied(source, "the loss is DPO's")


def share_of_domain(draft: Draft, source: str) -> None:
    """Convert the share of a domain's prompts in each step; one domain alone has them all."""
    domain, share = source.rpartition(".")[2], number(draft.get(source))
    if share == 1:
        draft.implied(source, "there is only this domain")
    elif DOMAINS not in draft.recipe:
        draft.unsupported(source, "write the shares of the data sources as train_dataset.source_weights")
    else:
        draft.mapped(source, f"train_dataset.source_weights.{domain}", share, "the domain is the data source")


TABLES = read_tables("roll", {**globals(), **vars(agents)}, {"megatron": megatron.TABLES})
TOP = TABLES["top"] | TABLES["distillation"].only_if(has_teacher, "distillation is switched off")
RULES = (
    TOP
    | TABLES["agents"].only_if(has_turns, reasons.ONE_COMPLETION)
    | TABLES["environments"].wrapped(agents.of_played).under(agents.OWN_ENVS + "*.")
    | TABLES["critic"].wrapped(of_critic).under(CRITIC)
    | TABLES["reference"].bare().under(REF)
    | TABLES["actor_infer"].bare().under(INFER)
    | TABLES["actor_train"].under(TRAIN)
    | TABLES["generating_args"].bare().under(GENERATING)
)
CRITICS = {"critic_warmup": 0, **TABLES["training_args"].under(CRITIC + "training_args.").defaults}
"""The defaults of a critic; its number format and its recomputation are the actor's unless they are written."""
OF_SECTIONS = {
    TRAIN: TABLES["batch"].under(TRAIN + "training_args.").defaults,
    GENERATING: TABLES["generating_args"].under(GENERATING).defaults,
    HELD_OUT: TABLES["generating_args"].under(HELD_OUT).defaults,
}
"""The defaults of sections that a source may have, by section."""
