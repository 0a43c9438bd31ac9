"""Images of ROLL's rows: its code names their column, and its keys bound their sizes."""

from __future__ import annotations

from fivefold_import.draft import Draft
from fivefold_import.models import reads_images, sees
from fivefold_import.reasons import NO_MULTIMODAL
from fivefold_import.values import whole

COLUMN = "images"
BOUNDS = {"image_min_pixels": "min_pixels", "image_max_pixels": "max_pixels"}
SECTIONS = {"actor_train.": "train_dataset", "validation.": "valid_dataset"}
FREEZES = "actor_train.model_args.freeze_module_prefix"
TOWER = "vision_model"
"""ROLL's name for the vision tower."""


def convert_frozen_tower(draft: Draft) -> None:
    """Convert the key that keeps the vision tower as it is."""
    if draft.get(FREEZES) == TOWER:
        draft.implied(FREEZES, "the vision tower is not trained")


def convert_images(draft: Draft) -> bool:
    """Convert the images of prompts, once the model is known; return whether rows have some."""
    model = str(draft.recipe.get("actor.path", ""))
    is_seeing = sees(model) and (reads_images(model) or _shows_images(draft))
    for part, section in SECTIONS.items():
        if is_seeing and f"{section}.path" in draft.recipe:
            draft.recipe[f"{section}.image_key"] = COLUMN
        for name, bound in BOUNDS.items():
            for key in draft.keys(f"{part}data_args.{name}"):
                if f"{section}.image_key" in draft.recipe:
                    draft.mapped(key, f"{section}.{bound}", draft.read(key, whole))
                else:
                    draft.unsupported(key, NO_MULTIMODAL)
    if "train_dataset.image_key" in draft.recipe:
        draft.notes.append(f"image_key={COLUMN}, the column that holds the images in ROLL's rows")
    return "train_dataset.image_key" in draft.recipe


def _shows_images(draft: Draft) -> bool:
    """Return whether a source for a model whose name does not say that it sees has prompts with images."""
    bounds = [key for part in SECTIONS for name in BOUNDS for key in draft.keys(f"{part}data_args.{name}")]
    rewards = [value for key, value in draft.recipe.items() if key.startswith("reward.") and key.endswith(".fn")]
    return bool(bounds) or "detection" in rewards
