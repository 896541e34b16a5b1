"""The target's states at every position of every text, computed once: what a draft is fed with, and p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch

from services.common.engine.model import LoadedModel
from services.distill.corpus import Corpus
from services.distill.errors import DistillError

_TEXTS = 8
_SAMPLE = 12
_SOFT_CAPS: Final = {"final_logit_softcapping": "its logits", "attn_logit_softcapping": "its attention's scores"}
# Greatest difference of logits, as a share of the greatest.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def states(
    loaded: LoadedModel, tokens: torch.Tensor, feature_layers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's states and the logarithms of the softmax's denominators.

    Args:
        loaded: The target.
        tokens: int64[texts, positions].
        feature_layers: After how many layers; the last one is after the final norm too, what the head reads.

    Returns:
        [texts, positions, len(feature_layers) * hidden] and float32[texts, positions], on the CPU.
    """
    body: Any = loaded.model.base_model
    with torch.inference_mode():
        out = body(input_ids=tokens.to(loaded.device), use_cache=False, output_hidden_states=True)
        known = {loaded.config.num_hidden_layers: out.last_hidden_state}
        features = torch.cat([known.get(layer, out.hidden_states[layer]) for layer in feature_layers], dim=-1)
        head = loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        # Text by text: a row of logits is as long as the vocabulary.
        totals = [torch.logsumexp(head(text)[:, : loaded.vocab_size].float(), dim=-1) for text in out.last_hidden_state]
    return features.cpu(), torch.stack(totals).cpu()


def check_target(loaded: LoadedModel) -> None:
    """Find out whether the target's logits are its last state times its head, which is what a draft is taught by.

    Raises:
        DistillError: They are not: soft caps, scales, biases.
    """
    # By name, for a cap is seen in large logits only, and those of a sample may be small.
    for setting, what in _SOFT_CAPS.items():
        if (cap := getattr(loaded.config, setting, None)) is not None:
            raise _refusal(loaded, f"{what} have a soft cap ({setting} is {cap})")
    sample = torch.arange(_SAMPLE).mul(7).remainder(loaded.vocab_size).unsqueeze(0)
    with torch.inference_mode():
        expected = loaded.model(input_ids=sample.to(loaded.device), use_cache=False).logits[0].float().cpu()
        head = loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None:
            raise _refusal(loaded, "it has no head of its own")
        last, _ = states(loaded, sample, [loaded.config.num_hidden_layers])
        logits = (last[0].to(loaded.device) @ head.weight.T).float().cpu()
    difference = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= _TOLERANCE[loaded.model.dtype]:
        raise _refusal(
            loaded, f"its logits differ from its last state times its head, by {difference:.2g} of the greatest"
        )


def needed_bytes(tokens: int, feature_width: int) -> int:
    """Return what the states of so many tokens take on disk: bfloat16 each, and the softmax's denominator."""
    return tokens * (2 * feature_width + 4)


def write_states(
    loaded: LoadedModel,
    corpus: Corpus,
    folder: Path,
    feature_layers: Sequence[int],
    until: Callable[[], bool],
    report: Callable[[int], None],
) -> None:
    """Compute the states of the texts that have none yet, until `until()`; `report` gets how many texts have.

    Written are states.bin (bfloat16[texts, width, features]), logz.bin (float32[texts, width]) and, after each batch,
    done.txt: how many texts are ready.
    """
    count, width = corpus.tokens.shape
    hidden = len(feature_layers) * loaded.config.hidden_size
    done, first = folder / "done.txt", ready_texts(folder)
    with (
        _grown(folder / "states.bin", 2 * hidden * width * count) as features,
        _grown(folder / "logz.bin", 4 * width * count) as totals,
    ):
        while first < count and not until():
            last = min(first + _TEXTS, count)
            longest = int(corpus.lengths[first:last].max())
            texts = torch.from_numpy(corpus.tokens[first:last, :longest].astype(np.int64))
            values, log_totals = states(loaded, texts, feature_layers)
            for row, (value, total) in enumerate(zip(values.to(torch.bfloat16), log_totals, strict=True), first):
                _put(features, 2 * hidden * width * row, value.contiguous().view(torch.int16))
                _put(totals, 4 * width * row, total)
            features.flush()
            totals.flush()
            first = last
            partial = done.with_suffix(".partial")
            partial.write_text(str(first))
            partial.replace(done)
            report(first)


def ready_texts(folder: Path) -> int:
    """Return how many texts have their states."""
    done = folder / "done.txt"
    return int(done.read_text()) if done.exists() else 0


def _grown(path: Path, size: int) -> BinaryIO:
    """Open a file of at least this size. What is in it stays; what no text needs is a hole and takes no room."""
    path.touch()
    file = path.open("r+b")
    if file.seek(0, 2) < size:
        file.truncate(size)
    return file


def _put(file: BinaryIO, at: int, numbers: torch.Tensor) -> None:
    # Written and not mapped: a full disk is then an error and not a dead process.
    file.seek(at)
    file.write(numbers.numpy().tobytes())


def _refusal(loaded: LoadedModel, reason: str) -> DistillError:
    return DistillError(f"{loaded.model_id} ({loaded.config.model_type}) cannot be distilled: {reason}")
