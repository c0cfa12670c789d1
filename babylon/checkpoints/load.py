"""Load what ``save_pretrained`` wrote: a full model, or a LoRA adapter merged into its base."""

from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from babylon.errors import ModelError

_REASON = 300  # characters: some of these errors fill a screen


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds a LoRA adapter rather than a full model."""
    return (Path(path) / "adapter_config.json").exists()


def load_policy(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A policy in eval mode, in fp32, on the GPU when there is one, and its tokenizer.

    ``path`` is a directory or a Hugging Face id.

    Raises:
        ModelError: nothing loads from there.
    """
    try:
        if is_adapter(path):
            base = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            model = PeftModel.from_pretrained(model, str(path)).merge_and_unload()
        else:
            model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # four libraries read these files, and raise what they like
        reason = " ".join(str(error).split())[:_REASON].rstrip(".") or type(error).__name__
        raise ModelError(f"no policy loads from {path}: {reason}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer  # type: ignore[arg-type]
