"""A toy language model: it tests the scheduler, the block pool and the serving of requests without a model.

Each token is written to its slot of every KV group's pool, and the next token is a hash of all the tokens
that the block tables lead to. So a wrong block, slot, length or position shows in the text; a window hides
what lies before it. Everything is integer arithmetic over NumPy arrays: one step of 16 requests takes well
under a millisecond.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import EngineFailure, EngineFormatError
from trtforge.runtime import manifest as manifest_format
from trtforge.runtime.executors.base import ExecutorLost, StepArrays
from trtforge.runtime.manifest import FileEntry, KVGroup, KVLayout, Limits, Manifest

BEHAVIOUR = "null.json"
BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259  # the 256 bytes, each token its own byte value, and the three above

# What it says: letters and spaces mostly, and now and then bytes that are characters only together, or not at
# all.
ALPHABET = np.frombuffer(b"etaoinshrdlu cmfwypvbgkqjxz " * 8 + "é世🙂\n".encode() + b"\xff", np.uint8)
#: Logits of the four candidates; all others have 0.
CANDIDATE_LOGITS = np.array([8, 7, 6, 5], np.float32)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class NullBehaviour:
    """How the toy model behaves, in `null.json` of its engine directory; for tests.

    delay: seconds added to each step. eos_every: one token in so many is the end token (0: none).
    fail_steps: steps (the first is 1) that raise. lost_at: the step from which the executor is lost for good.
    """

    delay: float = 0.0
    eos_every: int = 0
    fail_steps: tuple[int, ...] = ()
    lost_at: int | None = None


class NullExecutor:
    """The toy model behind the executor's contract. A pool is INT64 [num_blocks, tokens_per_block]."""

    def __init__(self, manifest: Manifest, behaviour: NullBehaviour) -> None:
        self.manifest = manifest
        self.behaviour = behaviour
        self.steps = 0
        self._pools: list[NDArray[np.int64]] = []
        rng = np.random.Generator(np.random.PCG64(7))
        # One odd factor per position and group, so that the order of tokens matters.
        shape = (len(manifest.kv.groups), manifest.limits.max_seq_len + manifest.kv.tokens_per_block)
        self._factors = rng.integers(1, 2**62, shape, dtype=np.uint64) | np.uint64(1)

    def allocate(self, num_blocks: Sequence[int]) -> None:
        tokens_per_block = self.manifest.kv.tokens_per_block
        self._pools = [np.full((n, tokens_per_block), -1, np.int64) for n in num_blocks]

    def run(self, arrays: StepArrays, meanwhile: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        meanwhile()
        self.steps += 1
        if self.behaviour.lost_at is not None and self.steps >= self.behaviour.lost_at:
            raise ExecutorLost(f"the null executor was told to be lost at step {self.behaviour.lost_at}")
        if self.steps in self.behaviour.fail_steps:
            raise EngineFailure(f"the null executor was told to fail at step {self.steps}")
        if self.behaviour.delay:
            time.sleep(self.behaviour.delay)
        for pool, slots in zip(self._pools, arrays.slot_mapping, strict=True):
            pool.reshape(-1)[slots] = arrays.token_ids
        return self._logits(self._hashes(arrays))

    def close(self) -> None:
        self._pools = []

    def _hashes(self, arrays: StepArrays) -> NDArray[np.uint64]:
        """[R]: for each row of logits, a hash of the tokens at 0..p (or within the window) of its request."""
        rows = arrays.logit_rows  # [R]
        request = np.searchsorted(arrays.query_start, rows, side="right") - 1  # [R], of B
        last = arrays.positions[rows][:, None]  # [R, 1]
        total = np.zeros(len(rows), np.uint64)
        for g, group in enumerate(self.manifest.kv.groups):
            tables = arrays.block_tables[g][request]  # [R, max_blocks]
            width = tables.shape[1] * self.manifest.kv.tokens_per_block
            tokens = self._pools[g][tables].reshape(len(rows), width)  # [R, max_blocks * tokens_per_block]
            at = np.arange(width)[None, :]
            seen = (at <= last) & (at < arrays.kv_lengths[request][:, None])
            if group.window is not None:
                seen &= at > last - group.window
            factors = self._factors[g, :width]
            terms = (tokens.astype(np.uint64) + np.uint64(3)) * factors
            total += np.where(seen, terms, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        return _mix(total)

    def _logits(self, hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
        """[R, vocab]: four candidates per row, drawn from the alphabet by the hash."""
        logits = np.zeros((len(hashes), VOCAB_SIZE), np.float32)
        rows = np.arange(len(hashes))
        # The best one is written last: it stays the best where candidates coincide.
        for rank in reversed(range(len(CANDIDATE_LOGITS))):
            pick = _mix(hashes + np.uint64(rank)) % np.uint64(len(ALPHABET))
            logits[rows, ALPHABET[pick.astype(np.intp)]] = CANDIDATE_LOGITS[rank]
        if self.behaviour.eos_every:
            ends = _mix(hashes + np.uint64(99)) % np.uint64(self.behaviour.eos_every) == 0
            logits[rows[ends], EOS] = CANDIDATE_LOGITS[0] + 1
        return logits


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def open_executor(engine_dir: Path, manifest: Manifest, threads: int | None = None) -> NullExecutor:
    try:
        raw = json.loads((engine_dir / BEHAVIOUR).read_text())
        behaviour = NullBehaviour(**{**raw, "fail_steps": tuple(raw["fail_steps"])})
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise EngineFormatError(
            f"{engine_dir / BEHAVIOUR}: cannot be read ({e}); write the engine again"
        ) from e
    return NullExecutor(manifest, behaviour)


def write_null_engine(
    path: Path,
    limits: Limits | None = None,
    *,
    tokens_per_block: int = 16,
    windows: Sequence[int | None] = (None,),
    behaviour: NullBehaviour | None = None,
) -> Manifest:
    """Write an engine directory for the target `null`, with a byte-level tokenizer and a chat template.

    windows: one KV group for each.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(_tokenizer_json())
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": True})
    )
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    (path / BEHAVIOUR).write_text(json.dumps(asdict(behaviour or NullBehaviour())))
    files = {
        f.name: FileEntry(f.stat().st_size, manifest_format.sha256(f))
        for f in sorted(path.iterdir())
        if f.name != manifest_format.MANIFEST_NAME
    }
    groups = tuple(KVGroup((i,), kv_heads=1, head_size=2, window=w) for i, w in enumerate(windows))
    manifest = Manifest(
        target="null",
        model={
            "name": "null",
            "source": "trtforge",
            "family": "null",
            "architecture": "null",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 1,
            "num_layers": len(groups),
            "num_heads": 1,
            "num_parameters": 0,
        },
        recipe="full_prec",
        kv=KVLayout("fp32", tokens_per_block, groups),
        limits=limits or Limits(),
        ropes=(),
        eos_token_ids=(EOS,),
        bos_token_id=BOS,
        pad_token_id=PAD,
        files=files,
    )
    (path / manifest_format.MANIFEST_NAME).write_text(manifest.to_json())
    return manifest


def _tokenizer_json() -> str:
    """Byte-level, no merges: token i is byte i. A BOS is put before every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE

    # The byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for 256, 257, ... in
    # order.
    own = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = [b for b in range(256) if b not in own]
    vocab = {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<pad>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return str(tokenizer.to_str())
