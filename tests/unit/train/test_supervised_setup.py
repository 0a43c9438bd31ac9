"""What supervised runs say, and what they refuse, before a process is started."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fivefold import Run
from fivefold.checkpoints.changes import RecipeChangedError
from fivefold.config.load import load_recipe
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.dpo import LabelledAnswers
from fivefold.sft import FineTuning
from fivefold.supervised import set_up
from fivefold.train_setup import set_up as set_up_train

ROOT = Path(__file__).resolve().parents[3]
RECIPES, TINY = ROOT / "recipes", ROOT / "fivefold" / "models" / "tiny-moe"


def test_the_banner_tells_the_examples_that_fill_no_step(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": f"{n + 1}"}) + "\n" for n in range(11)))
    keys = [f"train_dataset.path={rows}", "valid_dataset=null", "total_train_epochs=2"]
    said = []
    for batch_size in (4, 11):
        batch = f"train_dataset.batch_size={batch_size}"
        recipe = load_recipe(RECIPES / "tiny-moe-sft.yaml", [*keys, batch], SFTRecipe)
        said.append(set_up(recipe, FineTuning(recipe)).facts()["steps"])
    assert said == ["4 of 4 examples; 3 examples of each epoch fill no step", "2 of 11 examples"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([f"{n}+1=" for n in range(8)], []),
        (["1+1="] * 4 + [f"{n}+2=" for n in range(4)], []),
        (["1+1="] * 8, ["the 8 prompts of train_dataset are 1 different ones"]),
        (["1+1="] * 4 + ["2+1="] * 4, ["the 8 prompts of train_dataset are 2 different ones"]),
        (
            [f"{n}+1=" for n in range(4)] + [f"{n}+1+1+1+1+1=" for n in range(4)],
            ["4 of 8 rows of train_dataset are dropped, because they have more tokens than train_dataset.max_length"],
        ),
        ([f"{n}+1=" for n in range(5)] + [f"{n}+1+1+1+1+1=" for n in range(3)], []),
    ],
)
def test_prompts_that_are_all_alike_or_mostly_too_long_are_told(
    tmp_path: Path, texts: list[str], words: list[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text, "answer": "2"}) + "\n" for text in texts))
    keys = [f"train_dataset={{path: {rows}, batch_size: 4, max_length: 8, answer_key: answer}}", "valid_dataset=null"]
    recipe = load_recipe(RECIPES / "quickstart.yaml", [*keys, "actor.ppo_n_minibatches=1"], TrainRecipe)
    warnings = list(set_up_train(recipe).warnings())
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_a_step_that_the_run_does_not_have_cannot_be_recorded(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": "1+1=", "response": "2"}) + "\n") * 4)
    keys = [f"train_dataset.path={rows}", "train_dataset.batch_size=2", "valid_dataset=null", "total_train_epochs=1"]
    places = [f"cluster.fileroot={tmp_path / 'runs'}", "profile.steps=[2, 3]"]
    with pytest.raises(ValueError, match=r"profile\.steps has 3, but the last step of the run is 2: name"):
        Run(load_recipe(RECIPES / "tiny-moe-sft.yaml", [*keys, *places], SFTRecipe)).finish()
    assert not (tmp_path / "runs").exists()


def test_gpus_that_the_machine_lacks_are_told_before_the_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keys = ["cluster.n_gpus_per_node=3", f"cluster.fileroot={tmp_path}", f"train_dataset.path={tmp_path / 'no.jsonl'}"]
    with pytest.raises(ValueError, match=r"^cluster\.n_gpus_per_node is 3, but this machine has 0 GPUs: set"):
        Run(load_recipe(RECIPES / "tiny-moe-sft.yaml", keys, SFTRecipe)).finish()


def test_what_is_wrong_with_a_recipe_is_told_before_what_differs_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RecipeChangedError("train_dataset.batch_size differs")

    monkeypatch.setattr("fivefold.run.whole_run.find_start", refuse)
    place = f"cluster.fileroot={tmp_path}"
    with pytest.raises(ValueError, match=r"model path './none': there is no such folder"):
        Run(load_recipe(RECIPES / "tiny-moe-sft.yaml", [place, "actor.path=./none"], SFTRecipe)).finish()
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": "1+1=", "response": "2"}) + "\n") * 4)
    keys = [place, f"train_dataset.path={rows}", "train_dataset.batch_size=2", "valid_dataset=null"]
    with pytest.raises(RecipeChangedError, match=r"batch_size differs"):
        Run(load_recipe(RECIPES / "tiny-moe-sft.yaml", keys, SFTRecipe)).finish()


def test_the_banner_tells_held_out_rows_that_are_trained_on_too(tmp_path: Path) -> None:
    """Without a split, both sections read that of training."""
    for split, numbers in (("train", range(6)), ("test", range(4, 8))):
        rows = [{"prompt": f"{n}+1=", "response": f"{n + 1}", "answer": f"{n + 1}"} for n in numbers]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [f"{section}.path={tmp_path}" for section in ("train_dataset", "valid_dataset")]
    of_answers = [f"{section}.answer_key=answer" for section in ("train_dataset", "valid_dataset")]
    said = []
    for split in ("null", "test"):
        keys = [*paths, "train_dataset.batch_size=2", f"valid_dataset.split={split}"]
        recipe = load_recipe(RECIPES / "tiny-moe-sft.yaml", keys, SFTRecipe)
        train = load_recipe(RECIPES / "quickstart.yaml", [*keys, *of_answers], TrainRecipe)
        said += [setup.facts()["held out"] for setup in (set_up(recipe, FineTuning(recipe)), set_up_train(train))]
    assert said == ["6 of 6 rows, 6 of them trained on too"] * 2 + ["4 of 4 rows, 2 of them trained on too"] * 2


def test_a_run_that_goes_on_another_day_has_the_prompts_of_its_first_one(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = (
        "{{ strftime_now('%d%m') }}+{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1="}], "response": "2"}))
    keys = [f"tokenizer_path={tmp_path}", f"train_dataset.path={rows}", "train_dataset.batch_size=1"]
    recipe = load_recipe(RECIPES / "tiny-moe-sft.yaml", [*keys, "valid_dataset=null"], SFTRecipe)
    first, second = (datetime(2024, 3, day, tzinfo=UTC) for day in (5, 6))
    prompts = [set_up(recipe, FineTuning(recipe), day).data.examples[0].prompt_ids for day in (first, second, first)]
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["0503+1=", "0603+1=", "0503+1="]


def test_kto_compares_no_held_out_answer_with_itself(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "response": "2", "label": True}
    files = [tmp_path / f"{n}.jsonl" for n in (1, 2)]
    for n, file in enumerate(files, start=1):
        file.write_text((json.dumps(row) + "\n") * n)
    keys = [
        "actor.loss_type=kto",
        "train_dataset.batch_size=2",
        "train_dataset.limit=4",
        "valid_dataset.label_key=label",
    ]
    one, two = (
        load_recipe(RECIPES / "quickstart-dpo.yaml", [*keys, f"valid_dataset.path={file}"], DPORecipe) for file in files
    )
    with pytest.raises(
        ValueError, match=r"compared with another one, and valid_dataset has 1 \(1 of 1 rows\): hold out more"
    ):
        set_up(one, LabelledAnswers(one))
    assert set_up(two, LabelledAnswers(two)).facts()["held out"] == "2 of 2 rows"


def with_new_token(folder: Path, row: dict[str, str]) -> list[str]:
    """Return the keys of a recipe for a row in which `<new>` is the first token that the model does not have."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens([*(f"<{n}>" for n in range(128 - len(tokenizer))), "<new>"])
    tokenizer.save_pretrained(folder)
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(row))
    keys = [f"tokenizer_path={folder}", f"train_dataset.path={rows}", "train_dataset.batch_size=1"]
    return [*keys, "valid_dataset=null"]


@pytest.mark.parametrize("row", [{"prompt": "1+<new>=", "response": "2"}, {"prompt": "1+1=", "response": "<new>"}])
def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path, row: dict[str, str]) -> None:
    """Slices of an embedding would take them for tokens of other ranks, and train on."""
    recipe = load_recipe(RECIPES / "tiny-moe-sft.yaml", with_new_token(tmp_path, row), SFTRecipe)
    with pytest.raises(ValueError, match="train_dataset has token 128, but the model's vocabulary has 128 tokens"):
        set_up(recipe, FineTuning(recipe))


def test_prompts_with_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    keys = with_new_token(tmp_path, {"prompt": "1+<new>=", "answer": "2"})
    recipe = load_recipe(
        RECIPES / "quickstart.yaml",
        [*keys, "train_dataset.answer_key=answer", "actor.ppo_n_minibatches=1"],
        TrainRecipe,
    )
    with pytest.raises(ValueError, match="a prompt has token 128, but the model's vocabulary has 128 tokens"):
        set_up_train(recipe)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("stats.n_logged_samples=all", "stats.n_logged_samples is about completions, and this run samples none"),
        ("stats.logged_tokens=false", "stats.logged_tokens is about"),
        ("stats.shown_samples_freq_steps=null", "stats.shown_samples_freq_steps is about"),
    ],
)
def test_keys_without_effect_are_refused(override: str, problem: str) -> None:
    for name, schema in (("tiny-moe-sft", SFTRecipe), ("quickstart-dpo", DPORecipe), ("quickstart-rm", RMRecipe)):
        load_recipe(RECIPES / f"{name}.yaml", ["stats.trackers=[]", "recover.keep_best=accuracy"], schema)
        with pytest.raises(ValueError, match=problem):
            load_recipe(RECIPES / f"{name}.yaml", [override], schema)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["valid_dataset=null", "evaluator.freq_steps=2"], "the section evaluator has no effect without held-out rows"),
        (["valid_dataset=null", "recover.keep_best=eval/nll"], "keep_best=eval/nll is measured on held-out rows"),
        (["valid_dataset.path=v", "train_dataset.hold_out=0.1"], "hold_out=0.1 and valid_dataset exclude each other"),
        (["valid_dataset=null", "train_dataset.hold_out=2.5"], "hold_out=2.5 is neither a share below 1 nor a whole"),
    ],
)
def test_held_out_rows_and_what_needs_them_are_consistent(overrides: list[str], problem: str) -> None:
    for name, schema in (("tiny-moe-sft", SFTRecipe), ("quickstart-dpo", DPORecipe), ("quickstart-rm", RMRecipe)):
        with pytest.raises(ValueError, match=problem):
            load_recipe(RECIPES / f"{name}.yaml", overrides, schema)
    load_recipe(RECIPES / "tiny-moe-sft.yaml", ["evaluator.freq_steps=2", "recover.keep_best=eval/nll"], SFTRecipe)


@pytest.mark.parametrize("metric", ["accuracy", "response_length"])
def test_a_measure_that_is_never_made_cannot_end_a_run(tmp_path: Path, metric: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": f"{n + 1}"}) + "\n" for n in range(4)))
    keys = [f"train_dataset={{path: {rows}, batch_size: 2, hold_out: 1}}", "valid_dataset=null"]
    stopping = [f"evaluator.early_stopping={{patience: 2, metric: {metric}}}", f"cluster.fileroot={tmp_path}"]
    with pytest.raises(ValueError, match=rf"metric={metric} is no measure of the held-out data.*name one of nll"):
        Run(load_recipe(RECIPES / "tiny-moe-sft.yaml", [*keys, *stopping], SFTRecipe)).finish()
