"""Log-probabilities of logged completions and their gradient: the only interface to the model.

Four paths give the same values. ``packed`` and ``piecewise`` forward every shared prefix once,
with FlexAttention or with plain attention piece by piece, and ``stateful`` node by node, for layers
with a state. ``padded`` pads calls into batches, for
models without standard attention. When memory runs out, ``FittingForward`` repeats the work in
smaller portions, then fails with advice.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from babylon.training.grpo.attention.packed import packed_attention
from babylon.training.grpo.attention.piecewise import piecewise_attention
from babylon.training.grpo.config import TrainerConfig
from babylon.training.grpo.head import head_alone
from babylon.training.grpo.lockstep import passes_of
from babylon.training.grpo.portion_size import SMALLEST, portion_tokens, tokens_in_memory
from babylon.training.grpo.prefix_tree import PrefixTree, compile_tree
from babylon.training.grpo.rope import length_classes, sequences_of
from babylon.training.grpo.router_balance import RouterBalance, RouterLossError, router_balance
from babylon.training.grpo.stateful import STATEFUL, StatefulForward
from babylon.training.grpo.threads import fitting_threads
from babylon.training.grpo.training_input import CallTokens
from babylon.training.grpo.tree_forward import (
    Loss,
    TreeForward,
    TreeValues,
    Values,
    backward,
    flat_places,
)

Path = Literal["packed", "piecewise", "stateful", "padded"]
logger = logging.getLogger(__name__)
KEPT_PORTIONS = 4  # of shared text: a deep conversation is forwarded once
T = TypeVar("T")
# device type → its tokens, whether activations are recomputed, and the updates that it has fitted
_FITS = "portion_that_fits"
TRY_MORE_AFTER = 10  # updates that fitted: a try may cost a repeated step
CHECKPOINT_AFTER = 2  # halvings: recomputing all layers costs a third more time
_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")  # torch raises no special type
_SLIDING = "sliding_attention"
_PROBE_NATS = 0.01  # two fp32 passes agree to about 1e-5
_COARSE_PROBE_NATS = 0.5  # bf16 matrix products on CUDA change logits by 0.1 and more


class PolicyForward:
    """A policy as a function from calls to log-probabilities.

    The model is put in ``eval()`` mode, because with dropout the ratios between passes would not
    start at one. Non-reentrant gradient checkpointing that was enabled on the model still works.

    Args:
        model: a causal LM of transformers, or a peft model around one.
        max_tokens: input tokens whose activations are in memory at once. None: ``portion_tokens``,
            and the activations of up to four times as many tokens of shared text are kept too.
            Other shared tokens are forwarded twice, so long calls can run faster with a higher
            value. When memory runs out, torch's error is raised unchanged. The only state is
            ``.grad``: clear it and create another ``PolicyForward`` with fewer tokens.
        entropy_gradient: entropies have a gradient, which costs a pass over the logits.
        router_loss: weight of the auxiliary loss of a mixture's routers, added in ``accumulate``.
            It costs a forward pass.
        path: None: ``packed`` on CUDA, else ``piecewise``, or ``stateful`` for layers with a state.
            For models that these do not support, ``padded``, with a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int | None = None,
        path: Path | None = None,
        entropy_gradient: bool = False,
        router_loss: float = 0.0,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: allow at least one")
        self.model = model.eval()
        self.passes = passes_of(model)
        self.entropy_gradient = entropy_gradient
        device = next(model.parameters()).device.type
        self.max_tokens = max_tokens or portion_tokens(device, _causal_lm(model).config.hidden_size)
        # ranks that pass together also go back together, so no pass can wait for its way back
        keeps = not max_tokens and not self.passes.together
        self.keep_tokens = KEPT_PORTIONS * self.max_tokens if keeps else 0
        self.balance: RouterBalance | None = None
        self.path: Path = path or "padded"
        if path is None:
            kernel: Path = "packed" if device == "cuda" else "piecewise"
            if _has_states(_causal_lm(model).config) and not self.passes.together:
                kernel = "stateful"
            # the kernel that is probed is the one that is used
            reason = _why_unsupported(model, kernel) or self._why_not_equal(kernel)
            if reason is None:
                self.path = kernel
            else:
                logger.warning("Calls are padded and prefixes are not shared, because %s", reason)
        # a lack of memory would end ranks that pass together, and the estimate is of the tree
        if not max_tokens and self.path == "packed" and not self.passes.together:
            self._fill_memory(device)
        if router_loss:
            if self.path in ("padded", "stateful"):
                raise RouterLossError(
                    f"ROUTER_AUX_LOSS has no form where calls are {self.path}: set it to 0"
                )
            self.balance = router_balance(_causal_lm(model).base_model, router_loss)

    def _fill_memory(self, device: str) -> None:
        """Forward more tokens at once, if that many fit into the device's memory."""
        config = _causal_lm(self.model).config
        room = tokens_in_memory(self.model, config)
        tokens = portion_tokens(device, config.hidden_size, room)
        if tokens > self.max_tokens:
            self.max_tokens = tokens
            self.keep_tokens = min(KEPT_PORTIONS * tokens, int(room) - tokens)

    def logprobs(self, tree: PrefixTree) -> TreeValues:
        """Values of all calls, without gradient."""
        weight = next(self.model.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        shape = 2, int(tree.offsets[-1])
        logprobs, entropy = torch.zeros(shape, dtype=dtype, device=weight.device)
        for chosen, part in self._classes(tree):
            places = torch.from_numpy(flat_places(tree.offsets, chosen)).to(weight.device)
            found = self._values(part)
            logprobs[places], entropy[places] = found.logprobs, found.entropy
        return TreeValues(logprobs=logprobs, entropy=entropy)

    def _values(self, tree: PrefixTree) -> TreeValues:
        if self.path != "padded":
            return self._shared(self.path).logprobs(tree)
        parts: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            for calls, values in self._batches(tree):
                for call, logprobs, entropy in zip(
                    calls, values.logprobs, values.entropy, strict=True
                ):
                    length = len(tree.calls[call].completion)
                    parts[call] = logprobs[:length], entropy[:length]
        columns = zip(*(parts[call] for call in range(len(parts))), strict=True)
        flat = [torch.cat(column) for column in columns]
        return TreeValues(logprobs=flat[0], entropy=flat[1])

    def accumulate(self, tree: PrefixTree, loss: Loss) -> None:
        """Add the gradient of ``loss`` over all calls to the parameters' ``.grad``.

        ``loss(calls, values)`` is called for groups of calls, with positions in ``tree.calls``.
        Every call is in one group. The returned scalars are summed, so the loss's denominator
        must not depend on the calls of a group.
        """
        for chosen, part in self._classes(tree):

            def of_part(
                calls: Sequence[int], values: Values, chosen: Sequence[int] = chosen
            ) -> Tensor:
                return loss([chosen[call] for call in calls], values)

            if self.path != "padded":
                self._shared(self.path).accumulate(part, of_part)
                continue
            for calls, values in self._batches(part):
                backward(of_part(calls, values))

    def finish(self) -> None:
        """Accompany the passes of the other ranks, if they need this one."""
        self.passes.finish(self._idle)

    def _run(self, one: Callable[[], T]) -> T:
        return self.passes.run(one, self._idle)

    def _idle(self, gradient: bool) -> None:
        """Pass one token, which changes no gradient."""
        tree = compile_tree([CallTokens(prompt=[0], completion=[0], logprobs=None)])
        if gradient:
            self.accumulate(tree, lambda _, values: 0 * values.logprobs.sum())
        else:
            self.logprobs(tree)

    def _classes(self, tree: PrefixTree) -> Iterator[tuple[Sequence[int], PrefixTree]]:
        """Calls with the same rotary frequencies, and their tree, while these are in force."""
        model = _causal_lm(self.model)
        lengths = [len(ids) - 1 for ids in tree.ids]
        for calls in length_classes(model.config, lengths):
            longest = max(lengths[call] for call in calls)
            with sequences_of(model.base_model, longest), self._threads():
                yield calls, tree if len(calls) == len(lengths) else tree.only(calls)

    def _threads(self) -> AbstractContextManager[None]:
        weight = next(self.model.parameters())
        if weight.device.type != "cpu":
            return nullcontext()
        return fitting_threads(_causal_lm(self.model).config.hidden_size)

    def _shared(self, path: Path) -> TreeForward | StatefulForward:
        model = _causal_lm(self.model)
        if path == "stateful":
            return StatefulForward(
                backbone=cast(PreTrainedModel, model.base_model),
                head=partial(head_alone, model),
                vocabulary=model.config.vocab_size,
                max_tokens=self.max_tokens,
                entropy_gradient=self.entropy_gradient,
            )
        return TreeForward(
            backbone=cast(PreTrainedModel, model.base_model),
            head=partial(head_alone, model),
            vocabulary=model.config.vocab_size,
            attention=packed_attention if path == "packed" else piecewise_attention,
            max_tokens=self.max_tokens,
            run=self._run,
            keep_tokens=self.keep_tokens,
            entropy_gradient=self.entropy_gradient,
            balance=self.balance,
        )

    def _why_not_equal(self, kernel: Path) -> str | None:
        """Compare a probe's values, for features that no configuration shows."""
        weight = next(self.model.parameters())
        calls = [CallTokens(prompt=[1, 2], completion=[c, 1, 2], logprobs=None) for c in (1, 2)]
        tree = compile_tree(calls)
        with torch.no_grad():
            padded = self._padded(calls).logprobs.flatten()
        try:
            shared = self._shared(kernel).logprobs(tree).logprobs
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
            # models of others: some layers do not pass on our argument, some need further ones, and
            # those of Gemma 3n get their angles by place and not by name
            return f"its layers do not support our attention ({error})"
        gap = float((padded - shared).abs().max())
        coarse = weight.is_cuda or any(
            p.dtype in (torch.bfloat16, torch.float16) for p in self.model.parameters()
        )
        if gap < (_COARSE_PROBE_NATS if coarse else _PROBE_NATS):
            return None
        return (
            f"its log-probabilities of a probe differ by {gap:.3f} nats between padded and shared"
        )

    def _batches(self, tree: PrefixTree) -> Iterator[tuple[list[int], Values]]:
        for calls in _similar_lengths(tree, self.max_tokens):
            chosen = [tree.calls[call] for call in calls]
            yield calls, self._padded(chosen)

    def _padded(self, calls: Sequence[CallTokens]) -> Values:
        run = partial(_padded_values, self.model, calls, self.entropy_gradient)
        logprobs, entropy = self._run(run)
        return Values(logprobs=logprobs, entropy=entropy)


def _similar_lengths(tree: PrefixTree, max_tokens: int) -> Iterator[list[int]]:
    """Batches of calls of similar length, at most ``max_tokens`` padded tokens each."""
    portion: list[int] = []
    for call in sorted(range(len(tree.calls)), key=lambda c: len(tree.ids[c]), reverse=True):
        widest = len(tree.ids[portion[0]]) if portion else 0
        if portion and widest * (len(portion) + 1) > max_tokens:
            yield portion
            portion = []
        portion.append(call)
    if portion:
        yield portion


def _causal_lm(model: nn.Module) -> PreTrainedModel:
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def _why_unsupported(model: nn.Module, kernel: Path) -> str | None:
    adapters = model.peft_config.values() if isinstance(model, PeftModel) else ()
    kinds = {str(c.peft_type.value) for c in adapters}
    if kinds - {"LORA"}:
        return f"its {', '.join(sorted(kinds))} adapter is not LoRA"
    if not isinstance(model := _causal_lm(model), PreTrainedModel):
        return f"{type(model).__name__} is not a model of transformers"
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if kernel == "stateful":
        return None
    if kinds := _other_layers(config):
        return f"it has layers of type {', '.join(sorted(kinds))}, whose state no tree shares"
    if not model._supports_attention_backend:
        return f"{type(model).__name__} does not use transformers' attention registry"
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        return f"{type(model).__name__} has no language-model head"
    return _why_layers_unsupported(model.base_model)


def _other_layers(config: PreTrainedConfig) -> set[str]:
    """Types of layers that are not attention over keys."""
    return set(getattr(config, "layer_types", None) or []) - {"full_attention", _SLIDING}


def _has_states(config: PreTrainedConfig) -> bool:
    """True if branches of the tree can continue the layers' states. Granite 4 also has none."""
    return config.model_type in STATEFUL and bool(_other_layers(config))


def _why_layers_unsupported(backbone: nn.Module) -> str | None:
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        return f"{type(backbone).__name__} has no .layers"
    parameters = inspect.signature(layers[-1].forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if not passes_on or "position_embeddings" not in names:
        return f"{type(layers[-1]).__name__} does not take rotary position embeddings"
    return None


def _padded_values(
    model: nn.Module, calls: Sequence[CallTokens], entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of calls padded into one batch. It works with every causal LM.

    The head runs only at positions that predict a completion token, in the precision of the model's
    other matrix products; the softmax is fp32. Padding is on the right, where causal attention does
    not see it, so no attention mask is needed.
    """
    device = next(model.parameters()).device
    inputs = [torch.tensor([*call.prompt, *call.completion]) for call in calls]
    input_ids = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True).to(device)
    starts = torch.tensor([len(call.prompt) - 1 for call in calls], device=device)
    lengths = torch.tensor([len(call.completion) for call in calls], device=device)
    steps = torch.arange(int(lengths.max()), device=device)
    mask = steps < lengths[:, None]  # [C, T]
    positions = torch.where(mask, starts[:, None] + steps, starts[:, None])
    needed, index = torch.unique(positions, return_inverse=True)
    logits = model(input_ids=input_ids[:, :-1], logits_to_keep=needed, use_cache=False).logits
    logits = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
    temperature = torch.tensor([call.temperature for call in calls], device=device)
    logprobs = torch.log_softmax(logits.float() / temperature[:, None, None], dim=-1)
    targets = input_ids.gather(1, positions + 1)
    chosen = logprobs.gather(-1, targets[..., None]).squeeze(-1)
    of_entropy = logprobs if entropy_gradient else logprobs.detach()
    entropy = -(of_entropy.exp() * of_entropy).sum(-1)
    return torch.where(mask, chosen, 0.0), torch.where(mask, entropy, 0.0)


class OutOfMemoryError(MemoryError):
    """The smallest portion does not fit."""


class FittingForward:
    """Forward passes of one update, in portions that are halved when memory runs out.

    Before the first halving, the activations of shared text are no longer kept. With
    ``checkpointing``, those inside layers are recomputed from the beginning.

    What fits is remembered in the optimiser's ``groups``, which are saved with every checkpoint,
    and counts where ``max_tokens`` is None.
    """

    def __init__(
        self,
        model: nn.Module,
        max_tokens: int | None,
        groups: Sequence[Mapping[str, Any]] = (),
        *,
        entropy_gradient: bool = False,
        router_loss: float = 0.0,
        checkpointing: bool = False,
    ) -> None:
        self._model = model
        self._options: dict[str, Any] = {
            "entropy_gradient": entropy_gradient,
            "router_loss": router_loss,
        }
        self.halvings = 0
        self._device = next(model.parameters()).device.type
        known = groups[0].get(_FITS, {}) if groups and not max_tokens else {}
        self._known: tuple[Any, ...] = known.get(self._device) or ()  # a count may be missing
        tokens, recompute = self._known[:2] or (None, False)
        with mixed_precision(model):
            self.forward = PolicyForward(model, max_tokens=max_tokens or tokens, **self._options)
        self.checkpointing = (checkpointing or recompute) and self._checkpoint()

    def remember(self, groups: Sequence[dict[str, Any]]) -> None:
        """Store the portion that fitted, if memory ran out. Now and then, store twice as much.

        Memory may have run out only because somebody else used it.
        """
        if not (self.halvings or self._known):
            return
        tokens, fitted = self.forward.max_tokens, 0 if self.halvings else sum(self._known[2:]) + 1
        fits: tuple[int, bool, int] | None = tokens, self.checkpointing, fitted
        # ranks that pass together cannot repeat a pass that does not fit
        if fitted >= TRY_MORE_AFTER and not self.forward.passes.together:
            plan = portion_tokens(self._device, _causal_lm(self._model).config.hidden_size)
            # None: the plan itself, with nothing recomputed
            fits = (2 * tokens, self.checkpointing, 0) if 2 * tokens < plan else None
        for group in groups:
            group[_FITS] = {**group.get(_FITS, {}), self._device: fits}

    def run(self, attempt: Callable[[PolicyForward], T]) -> T:
        """Call ``attempt`` until it fits into memory, and return its result.

        Raises:
            OutOfMemoryError: it does not fit with the smallest portions.
        """
        while True:
            try:
                with mixed_precision(self._model):
                    result = attempt(self.forward)
                    self.forward.finish()
                    return result
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                if self.forward.passes.together:
                    raise OutOfMemoryError(
                        f"out of memory with portions of {self.forward.max_tokens} tokens"
                        f" ({reason}), and ranks that share the weights cannot repeat a pass: lower"
                        " MAX_TOKENS, or raise TRAIN_PROCESSES"
                    ) from error
            # outside the except block, where no traceback holds the failed attempt's tensors
            self._halve(reason)

    def restore(self, halvings: int) -> None:
        """Halve the portions as often as before the progress was saved, if they were as large."""
        while self.halvings < halvings and not self._smallest():
            self._shrink()

    def _smallest(self) -> bool:
        return not self.forward.keep_tokens and self.forward.max_tokens // 2 < SMALLEST

    def _halve(self, reason: str) -> None:
        before = self.forward.max_tokens
        if self._smallest():
            raise OutOfMemoryError(
                f"out of memory with portions of {before} tokens, the smallest that were tried"
                f" ({reason}): train with TUNING=lora, a smaller BASE_MODEL, shorter prompts, or"
                " more memory"
            )
        self._shrink()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning(
            "out of memory with portions of %d tokens: the step is repeated with %d%s (%s)",
            before,
            self.forward.max_tokens,
            " and activations recomputed in the backward pass" if self.checkpointing else "",
            reason,
        )

    def _shrink(self) -> None:
        self.halvings += 1
        before = self.forward
        self.forward = PolicyForward(
            self._model,
            max_tokens=before.max_tokens if before.keep_tokens else before.max_tokens // 2,
            path=before.path,
            **self._options,
        )
        if self.checkpointing or self.halvings >= CHECKPOINT_AFTER:
            # each time, because the line above sets eval mode
            self.checkpointing = self._checkpoint()

    def _checkpoint(self) -> bool:
        """Recompute activations, except where layers take states, which transformers drops then."""
        return self.forward.path != "stateful" and checkpoint_activations(self._model)


def mixed_precision(model: nn.Module) -> AbstractContextManager[object]:
    """bf16 matrix products, except in the head: on CUDA, and with frozen weights in bf16.

    Tuned weights are fp32 in any case. The cache of cast weights is off: a weight cast in a pass
    without gradient would have no gradient in the next pass. Casting again costs little.
    """
    weights = list(model.parameters())
    device = weights[0].device.type
    if device != "cuda" and all(weight.dtype != torch.bfloat16 for weight in weights):
        return nullcontext()
    return torch.autocast(device, torch.bfloat16, cache_enabled=False)


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error is from an allocator: CUDA's, torch's for the CPU, or Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return not isinstance(error, OutOfMemoryError)
    return any(phrase in str(error) for phrase in _CPU_ALLOCATOR)


def checkpoint_activations(model: nn.Module) -> bool:
    """Keep only the layers' inputs and recompute the rest. Return False if the model cannot.

    transformers checkpoints layers only in training mode, which would enable dropout. Therefore
    only the layers' own flags are set, not those of the modules inside. The last layer is left
    out: the backward pass starts with it and would recompute its activations at once.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers[:-1]:
        vars(layer).update(
            _gradient_checkpointing_func=partial(checkpoint, use_reentrant=False),
            gradient_checkpointing=True,
            training=True,
        )
    return len(layers) > 1


def fitting_forward(
    model: nn.Module, config: TrainerConfig, groups: Sequence[Mapping[str, Any]]
) -> FittingForward:
    """The forward pass of an update. ``groups`` of the optimiser remember what fitted before."""
    return FittingForward(
        model,
        config.max_tokens,
        groups,
        entropy_gradient=config.entropy_floor > 0,
        router_loss=config.router_loss,
        checkpointing=config.activation_checkpointing,
    )
