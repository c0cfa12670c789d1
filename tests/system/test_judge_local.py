"""A checkpoint as judge: the project's engine serves a tiny model that answers, or babbles."""

import aiohttp
import pytest
import torch
from pydantic import SecretStr

from babylon.core.errors import ConfigError, ScoringError
from babylon.core.settings import JudgeSettings
from babylon.scoring.judge.group_prompts import prepare_group
from babylon.scoring.judge.judge_requirements import require_judge
from babylon.scoring.judge.judge_scorers import open_judge
from babylon.scoring.judge.judge_window import judge_window
from babylon.scoring.judge.judgment import GroundTruth, JudgeConfig, Rubric
from babylon.scoring.judge.memory_ledger import MemoryJudgments
from tests.judged import judged, step
from tests.tiny_policy import tiny_model, tiny_tokenizer

CONTEXT = 2048
RUBRIC = Rubric(name="tiny", text="Profit.")
CONFIG = JudgeConfig(list_size=1, rubric=RUBRIC, context_tokens=CONTEXT, passes=1)
GROUP = [judged("good", 90.0, [step(0, said="b")]), judged("bad", -90.0, [step(0, said="s")])]
ANSWERS = ['{"explanation":"","score":0.9}', '{"explanation":"","score":0.1}']


async def judged_by(path, tmp_path, **changes):
    judge = JudgeSettings(model_path=path, **changes)
    require_judge("ruler", judge)
    async with open_judge(judge, CONFIG, tmp_path / "judge.log") as (client, config):
        assert client.temperature == changes.get("temperature", 0.7)
        assert config.context_tokens == CONTEXT
        assert client.name.startswith(f"{path.name}@")
        return await judge_window(client, GROUP, GroundTruth(), config, ledger=MemoryJudgments())


def taught(directory):
    """A model overfitted to the two prompts of ``GROUP`` and their answers."""
    tokenizer, model = tiny_tokenizer(), tiny_model(0, max_position_embeddings=CONTEXT)
    sheet = prepare_group(GROUP, GroundTruth(), CONFIG)
    chats = [
        [*sheet.prompt((item,)).messages, {"role": "assistant", "content": answer}]
        for item, answer in enumerate(ANSWERS)
    ]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.2 if weight.dim() > 1 else 1.0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    learnt = len(ANSWERS[0]) + 1  # and the end of the answer; after it comes a line break
    for _ in range(300):
        logits = model(input_ids=ids, logits_to_keep=learnt + 2).logits[:, :-2]
        wanted = ids[:, -learnt - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        if loss < 0.005:
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


async def test_a_checkpoint_that_can_answer_judges(tmp_path):
    judgments = await judged_by(taught(tmp_path / "judge"), tmp_path)
    assert [round(one.score, 1) for one in judgments.scores] == [0.9, 0.1]
    assert judgments.requests == 2 and judgments.tokens > 0 and judgments.usd == 0


async def test_a_checkpoint_that_babbles_fails_the_stage_and_scores_nothing(tmp_path):
    path = tmp_path / "babbler"
    tiny_model(1, max_position_embeddings=CONTEXT).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    with pytest.raises(ScoringError, match=r"judge babbler@\w+ gave no usable judgment of 2 of 2"):
        await judged_by(path, tmp_path, temperature=0.0)  # else it may end its JSON by chance


async def test_nobody_else_of_this_machine_can_put_another_model_in_the_judges_place(tmp_path):
    path = tmp_path / "judge"
    tiny_model(1, max_position_embeddings=CONTEXT).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    judge = JudgeSettings(model_path=path, api_key=SecretStr("of-a-provider"))
    async with (
        open_judge(judge, CONFIG, tmp_path / "judge.log") as (client, _),
        aiohttp.ClientSession() as stranger,
    ):
        place = str(client._client.base_url).replace("/v1/", "/policies/judge")
        async with stranger.delete(place) as answer:
            assert answer.status == 401
        assert client._client.api_key != "of-a-provider"  # the engine has no need of it


async def test_a_path_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"JUDGE_MODEL_PATH=.*nowhere.* holds no model"):
        await judged_by(tmp_path / "nowhere", tmp_path)


def test_one_judge_at_a_time(tmp_path):
    both = JudgeSettings(model="m", model_path=tmp_path)
    with pytest.raises(ConfigError, match="name two judges: unset one"):
        require_judge("ruler", both)
