"""Load what ``save_pretrained`` wrote: a full model, or a LoRA adapter merged into its base.

Frozen policies of one base share it. The adapter of a large base stays beside its weights, which
are in memory once, for all of its policies; that of a small one is merged, which is faster, and
only what it leaves alone is shared. The base is forgotten with the last of its policies.
"""

import copy
import warnings
from pathlib import Path
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from peft import PeftConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from babylon.core.errors import ModelError

# peft 0.21 reads an attribute that transformers 5 renamed.
warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
# Loading weights is quick, and standard error is for our own words.
logging.disable_progress_bar()  # type: ignore[no-untyped-call]

_REASON = 300  # characters: some of these errors fill a screen
_LARGE = 64 * 2**20  # bytes
_bases: WeakValueDictionary[tuple[str, int], PreTrainedModel] = WeakValueDictionary()
_base_of: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()
_bases_lock = Lock()


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds a LoRA adapter rather than a full model."""
    return (Path(path) / "adapter_config.json").exists()


def load_policy(
    path: str | Path, *, frozen: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A policy in eval mode, in fp32, on the GPU when there is one, and its tokenizer.

    ``path`` is a directory or a Hugging Face id. A ``frozen`` policy's weights may be another's
    as well: they must not be changed.

    Raises:
        ModelError: nothing loads from there.
    """
    try:
        if is_adapter(path):
            model = _merged(str(path), PeftConfig.from_pretrained(str(path)), frozen)
        else:
            model = _sharing(_shared_base(str(path))) if frozen else _full(str(path))
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # four libraries read these files, and raise what they like
        reason = " ".join(str(error).split())[:_REASON].rstrip(".") or type(error).__name__
        raise ModelError(f"no policy loads from {path}: {reason}") from error
    return model, tokenizer


def _full(path: str) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return cast(PreTrainedModel, model.to(device).eval())


def _merged(path: str, config: PeftConfig, frozen: bool) -> PreTrainedModel:
    base = str(config.base_model_name_or_path)
    in_place = getattr(config, "bias", "none") != "none"  # loading overwrites the base's biases
    if not frozen or in_place:
        merged: Any = PeftModel.from_pretrained(_full(base), path).merge_and_unload()
        return cast(PreTrainedModel, merged.eval())
    shared = _shared_base(base)
    adapted: Any = PeftModel.from_pretrained(_sharing(shared), path)
    large = sum(weight.nbytes for weight in shared.parameters()) > _LARGE
    # a safe merge is one into copies
    policy = adapted.get_base_model() if large else adapted.merge_and_unload(safe_merge=True)
    _base_of[policy] = shared
    return cast(PreTrainedModel, policy.eval())


def _sharing(base: PreTrainedModel) -> PreTrainedModel:
    """A copy whose parameters are its own, but not what they hold: who computes with one model in
    a way of its own (attention, say) does not change the others."""
    memo: dict[int, Any] = {
        id(weight): torch.nn.Parameter(weight.data, requires_grad=False)
        for weight in base.parameters()
    }
    model = copy.deepcopy(base, memo)
    _base_of[model] = base
    return model


def _shared_base(path: str) -> PreTrainedModel:
    """One model for all who ask, unless its directory was written anew meanwhile."""
    files = Path(path).iterdir() if Path(path).is_dir() else ()
    key = path, max((file.stat().st_mtime_ns for file in files), default=0)
    with _bases_lock:
        base = _bases.get(key)
        if base is None:
            base = _bases[key] = _full(path).requires_grad_(False)
        return base
