"""Load every export with the library that it is for, and train a step with TRL: ``FOLDER``.

Runs in an environment without Babylon. Any failure ends the program.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import datasets
import tinker
import verifiers.v1 as vf
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from verifiers.v1.configs.taskset import TasksetConfig


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def openai(folder: Path) -> None:
    message = TypeAdapter(ChatCompletionMessageParam)
    for line in lines(folder / "openai.jsonl"):
        for one in line["messages"]:
            message.validate_python(one)


def tinker_datums(folder: Path) -> None:
    for line in lines(folder / "tinker.jsonl"):
        inputs = line["loss_fn_inputs"]
        tensors = {
            name: tinker.TensorData(
                data=values, dtype="int64" if name == "target_tokens" else "float32"
            )
            for name, values in inputs.items()
        }
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(line["model_input"]), loss_fn_inputs=tensors
        )
        assert datum.model_input.length == len(inputs["target_tokens"])


def atif(folder: Path) -> None:
    """Harbor's own models, with the rules that no JSON schema holds."""
    sys.path.append(str(Path(sys.prefix) / "harbor"))
    from harbor.models.trajectories import Trajectory

    for line in lines(folder / "atif.jsonl"):
        assert Trajectory.model_validate(line).steps


class PlayData(vf.TaskData):
    """A recorded call as a task."""

    answer: str
    info: dict


class PlayTask(vf.Task[PlayData]):
    """The task's class; a reward would compare a new reply with the recorded one's score."""


class PlayConfig(TasksetConfig):
    path: str = ""


class Plays(vf.Taskset[PlayTask, PlayConfig]):
    def load(self) -> Iterable[PlayTask]:
        for line in lines(Path(self.config.path)):
            yield PlayTask(PlayData(**line))


def verifiers(folder: Path) -> None:
    config = PlayConfig(id="plays", path=str(folder / "verifiers.jsonl"))
    tasks = list(Plays(config))
    assert [task.data.idx for task in tasks] == [0, 1]
    assert tasks[0].data.prompt[0].content == "what now?" and tasks[0].data.info["score"] == 0.25
    assert len({task.key for task in tasks}) == 2


def trl(folder: Path) -> None:
    model, tokenizer = folder / "model", AutoTokenizer.from_pretrained(folder / "model")
    common = {
        "output_dir": str(folder / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    ours = ("reward", "group", "margin", "tools")  # for other uses of the file
    for name, trainer, config in (
        ("trl", SFTTrainer, SFTConfig),
        ("trl-preference", DPOTrainer, DPOConfig),
    ):
        rows = datasets.load_dataset(
            "json", data_files=str(folder / f"{name}.jsonl"), cache_dir=str(folder / "cache")
        )["train"]
        done = trainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            args=config(**common),
            train_dataset=rows.remove_columns([name for name in ours if name in rows.features]),
            processing_class=tokenizer,
        ).train()
        assert done.global_step == 1, name
        print(f"{name}: one step, loss {done.training_loss:.3f}")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for check in (openai, tinker_datums, atif, verifiers, trl):
        check(place)
        print(f"{check.__name__}: loaded")
