"""The fields that vLLM's requests have: each is decided, trainable or not."""

import json
import subprocess

import pytest

from babylon.serving.vllm.process_group import environment_of_others
from tests.contract.engines import VLLM_PYTHON
from tests.unit.serving.test_openai_wire import OPENAI, VLLM, VLLM_UNDECIDED

pytestmark = pytest.mark.skipif(VLLM_PYTHON is None, reason="needs `make test-vllm`")
_LOOK = """
import json
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
asked = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
print(json.dumps([sorted(asked), list(SamplingParams.__struct_fields__)]))
"""
# Parameters of sampling that no field of a request has under its name. ``vllm_xargs`` fills
# ``extra_args``; the others shape the answer, or are vLLM's own.
_NO_FIELD = """
    detokenize extra_args flat_logprobs output_kind output_text_buffer_length prompt_logprob_start
    prompt_logprob_token_ids skip_clone skip_reading_prefix_cache trace_decode_token_ids
"""


def test_every_field_and_every_sampling_parameter_of_the_installed_vllm_is_decided() -> None:
    look = subprocess.run(
        [VLLM_PYTHON or "", "-c", _LOOK],
        env=environment_of_others(),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    asked, sampling = map(set, json.loads(look.stdout.splitlines()[-1]))
    assert asked - OPENAI == {*VLLM.split(), *VLLM_UNDECIDED.split()} - OPENAI
    public = {name for name in sampling if not name.startswith("_")}
    assert public - asked == set(_NO_FIELD.split())
