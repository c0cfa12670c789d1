"""Load a checkpoint of ``save_pretrained``: a full model, or a LoRA adapter with its base model.

Frozen policies of one base model share its weights. If the base is large, its weights are in memory
once, and each policy adds its adapter. If the base is small, adapters are merged, which is faster,
and policies share only the weights that no adapter changes. A base is freed together with the last
of its policies.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from peft import PeftConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from babylon.core.errors import ModelError
from babylon.core.learning_settings import Precision
from babylon.policies.checkpoint_files import adapter_base
from babylon.policies.tokenizer import load_tokenizer

# peft 0.21 reads an attribute that transformers 5 renamed.
warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)

_REASON = 300  # characters of an error: some are very long
_LARGE = 64 * 2**20  # bytes of a base model; adapters of larger bases are not merged
_bases: WeakValueDictionary[tuple[str, int, Precision], PreTrainedModel] = WeakValueDictionary()
_base_of: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()
_bases_lock = Lock()


def is_adapter(path: str | Path) -> bool:
    """True if a directory holds a LoRA adapter and not a full model."""
    return (Path(path) / "adapter_config.json").exists()


def load_policy(
    path: str | Path,
    *,
    frozen: bool = False,
    precision: Precision = "fp32",
    device: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy in eval mode, and its tokenizer.

    Args:
        path: a directory or a Hugging Face id.
        frozen: the caller does not change the weights, so other policies can share them.
        precision: of a full model's weights, except its head, which is fp32. "nf4" keeps 4 bits a
            weight of its linear layers (QLoRA, arXiv 2305.14314, section 3) with bitsandbytes.
            Frozen adapters stay fp32 beside a base in fewer bits.
        device: of a policy that is not frozen. None: the GPU if there is one.

    Raises:
        ModelError: nothing loads from ``path``.
    """
    try:
        if is_adapter(path):
            config = PeftConfig.from_pretrained(str(path))
            config.base_model_name_or_path = adapter_base(str(path))
            model = _merged(str(path), config, frozen, precision, device)
        elif frozen:
            model = _sharing(_shared_base(str(path), precision))
        else:
            model = _full(str(path), precision, device)
        tokenizer = load_tokenizer(path)
    except Exception as error:  # four libraries read these files, and raise many types
        reason = " ".join(str(error).split())[:_REASON].rstrip(".") or type(error).__name__
        raise ModelError(f"no policy loads from {path}: {reason}") from error
    return model, tokenizer


def refuse_other_inputs(model: PreTrainedModel) -> None:
    """Check that a model takes text alone, which is all that trainer and engine can give it.

    Raises:
        ModelError: it also has parts for images or sound.
    """
    if model.config.get_text_config() is not model.config:
        raise ModelError(
            f"{type(model).__name__} has parts for images or sound, which cannot be trained: take"
            " a model of text alone"
        )


@contextmanager
def quiet_ranks() -> Iterator[None]:
    """Context without PEFT's warning that ranks of experts are ignored, which they are not.

    PEFT 0.21 looks for the names of ``rank_pattern`` among modules only, and experts are
    parameters. It applies the ranks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"The following (rank|alpha)_pattern keys", RuntimeWarning
        )
        yield


def products(model: PreTrainedModel, precision: Precision) -> AbstractContextManager[object]:
    """Context of a pass over weights in ``precision``: products in bf16 if they are in few bits."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(model.device.type, torch.bfloat16)


def _full(path: str, precision: Precision = "fp32", device: str | None = None) -> PreTrainedModel:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    options: dict[str, object] = {}
    if precision == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
        options["device_map"] = device
    # safetensors 0.8 leaks 32 bytes a tensor that it reads from a mapped file. Small files are read
    # without a map: an engine loads many of them.
    if 0 < sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) <= _LARGE:
        options["disable_mmap"] = True
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    refuse_other_inputs(model)
    if precision != "nf4":
        torch.nn.Module.to(model, device)
    for module in model.modules():
        # bitsandbytes 0.50 packs the weights at the first pass in eval mode on a CPU with AVX-512
        # BF16, where the trainer always is. The gradient through packed weights is silently wrong.
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is not None:
        head.float()
    return model  # in eval mode, by from_pretrained


def _merged(
    path: str, config: PeftConfig, frozen: bool, precision: Precision, device: str | None
) -> PreTrainedModel:
    base = str(config.base_model_name_or_path)
    overwrites = getattr(config, "bias", "none") != "none"  # the adapter replaces base biases
    if not frozen or overwrites:
        with quiet_ranks():
            own = _full(base, precision, device)
            merged = PeftModel.from_pretrained(own, path).merge_and_unload()
        return cast(PreTrainedModel, merged.eval())
    shared = _shared_base(base, precision)
    with quiet_ranks():
        adapted = PeftModel.from_pretrained(_sharing(shared), path)
    large = sum(weight.nbytes for weight in shared.parameters()) > _LARGE
    large = large or precision != "fp32"  # a merge would round the adapter
    # a safe merge writes to copies, so the shared weights do not change
    made = adapted.get_base_model() if large else adapted.merge_and_unload(safe_merge=True)
    policy = cast(PreTrainedModel, made.eval())
    _base_of[policy] = shared
    return policy


def _sharing(base: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model that shares the data of its parameters.

    Changes of the modules, such as another attention, do not affect the other copies.
    """
    memo: dict[int, object] = {
        # a quantised weight is more than its data
        id(weight): torch.nn.Parameter(weight.data, requires_grad=False)
        if weight.is_floating_point()
        else weight
        for weight in base.parameters()
    }
    model = copy.deepcopy(base, memo)
    _base_of[model] = base
    return model


def _shared_base(path: str, precision: Precision) -> PreTrainedModel:
    """The model at ``path``, loaded once, and again if a file in its directory changed."""
    files = Path(path).iterdir() if Path(path).is_dir() else ()
    key = path, max((file.stat().st_mtime_ns for file in files), default=0), precision
    with _bases_lock:
        base = _bases.get(key)
        if base is None:
            base = _bases[key] = _full(path, precision).requires_grad_(False)
        return base
