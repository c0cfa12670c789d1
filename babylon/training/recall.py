"""Recall: how well a policy still writes chats that it must not forget.

``RECALL_CHATS`` names a file of chats, for example answers of other tasks that the fleet's reward
does not see. A policy's recall is the mean negative log-likelihood of their replies, in nats a
token; less is better. Every update is measured, and compared with the best of its line, which is
handed from checkpoint to checkpoint. Small losses therefore do not add up over months. Chats are
never trained on, so a policy cannot learn them by heart.
"""

from hashlib import blake2b
from pathlib import Path

import msgspec

from babylon.core.errors import ConfigError, TrainingError
from babylon.core.learning_settings import Precision
from babylon.formats.import_files import guess_format, read_traces
from babylon.formats.trace_rows import training_rows_of
from babylon.policies.load import load_policy
from babylon.training.call_tokens import log_left_out, scored_trajectories
from babylon.training.damaged import damage_logged
from babylon.training.grpo.forward import FittingForward, OutOfMemoryError
from babylon.training.grpo.prefix_tree import compile_tree
from babylon.training.likelihood import free_memory
from babylon.training.update_result import Recall

RECALL_FILE = "recall.json"  # in a checkpoint


def best_so_far(
    parent: str, chats: Path, max_tokens: int | None, precision: Precision = "fp32"
) -> Recall:
    """Return the figure of the parent, measured if it has none of these chats in this precision.

    Blocking. Called before an update: a file that cannot be read must not cost one.

    Raises:
        ConfigError: there is no such file, or no reply in it fits into the model's context.
        ImportFileError: the file cannot be read.
        TrainingError: the forward pass does not fit.
    """
    try:
        # Fewer bits cost nats themselves: they are no forgetting, so they begin the line anew.
        kind = b"" if precision == "fp32" else precision.encode()
        digest = blake2b(chats.read_bytes() + kind, digest_size=8).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"RECALL_CHATS={chats}: {error.strerror}: name a file of chats, or unset it"
        ) from error
    before: Recall | None = None
    if (known := Path(parent) / RECALL_FILE).exists():
        with damage_logged(known, "the line's best begins with the parent"):
            before = msgspec.json.decode(known.read_bytes(), type=Recall)
    if before is None or before.chats != digest:
        nats = nats_of(parent, chats, max_tokens, precision)
        before = Recall(nats=nats, best=nats, chats=digest)
    return before


def remembered(
    before: Recall,
    target: Path,
    chats: Path,
    max_tokens: int | None,
    precision: Precision = "fp32",
) -> Recall:
    """Measure the new checkpoint ``target``, and write the best of the line into it. Blocking.

    ``before`` is the parent's.

    Raises:
        TrainingError: the forward pass does not fit.
    """
    nats = nats_of(str(target), chats, max_tokens, precision)
    recall = Recall(nats=nats, best=min(nats, before.best), chats=before.chats)
    (target / RECALL_FILE).write_bytes(msgspec.json.encode(recall))
    return recall


def nats_of(
    policy: str, chats: Path, max_tokens: int | None, precision: Precision = "fp32"
) -> float:
    """Return the mean over all tokens of the replies, nats a token."""
    rows = training_rows_of(read_traces(chats, guess_format(chats)))
    model, tokenizer = load_policy(policy, frozen=True, precision=precision)
    context = int(getattr(model.config, "max_position_embeddings", None) or 1 << 30)
    owners, excluded = scored_trajectories(tokenizer, rows, context, model.config.vocab_size)
    log_left_out(sum(len(row.calls) for row in rows), excluded)
    if not (calls := [call for one in owners for call in one.calls]):
        raise ConfigError(f"RECALL_CHATS={chats}: none of the {len(rows)} chats has a reply")
    tree = compile_tree(calls)
    try:
        values = FittingForward(model, max_tokens).run(lambda pass_: pass_.logprobs(tree).logprobs)
    except OutOfMemoryError as error:
        raise TrainingError(f"RECALL_CHATS={chats}: {error}") from error
    nats = -float(values.double().mean())
    del model
    free_memory()
    return nats
