"""The real model: greedy tokens of the full-precision engine are those of transformers on the same weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stepping import Stepper

from trtforge.builder.build import build
from trtforge.builder.spec import BuildConfig
from trtforge.runtime.executors import open_executor
from trtforge.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

NEW_TOKENS = 48
#: Where the reference's own two best logits are closer than this, another choice is reported, not counted.
NEAR_TIE = 1e-3

PLAIN = (
    "",
    " ",
    "\n",
    "a",
    "42",
    "The",
    "Hello",
    "Once upon a time",
    "The capital of France is",
    "Water boils at",
    "import numpy as np\n",
    "def fibonacci(n: int) -> int:\n    ",
    "for (int i = 0; i < n; i++) {\n    sum +=",
    "SELECT name, COUNT(*) FROM users WHERE",
    '{"name": "Ada", "born": 1815, "works": [',
    "<html>\n<body>\n<h1>",
    "#!/bin/sh\nset -e\n",
    "| a | b |\n|---|---|\n| 1 |",
    "E = mc^2, and therefore",
    "1, 1, 2, 3, 5, 8, 13,",
    "Le chat est assis sur",
    "Привет, как",
    "今日はとても",
    "你好,世界",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "안녕하세요",
    "Γειά σου Κόσμε",
    "🙂🎉 party time 🎂",
    "\tindented\r\n\r\n  twice",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
)
MESSAGES = (
    "What is a large language model?",
    "Write a haiku about the sea.",
    "Name three prime numbers above 100.",
    "Translate to German: I would like a coffee, please.",
    "Explain to a child why the sky is blue, in one sentence.",
    "Write a Python function that reverses a string.",
)
#: (tokens, seed) of long prompts
LONG = ((400, 1), (1500, 2))


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """40 prompts as token ids; an empty one is the tokenizer's end token alone, as the model was trained on."""
    ids = [tokenizer.encode(text) or [0] for text in PLAIN]
    ids += [tokenizer.encode_messages([{"role": "user", "content": text}]) for text in MESSAGES]
    ids += [tokenizer.encode(letter(seed))[:length] for length, seed in LONG]
    assert len(ids) == 40 and [len(i) for i in ids[-2:]] == [400, 1500]
    return ids


def letter(seed: int) -> str:
    """A long text that makes some sense and never repeats itself exactly."""
    rng = np.random.default_rng(seed)
    subjects = ("the old captain", "a baker from the village", "my sister", "the mayor", "nobody", "the cat")
    verbs = ("remembered", "sold", "painted", "could not find", "wrote about", "dreamt of")
    objects = (
        "the blue boat",
        "seven letters",
        "the road to the north",
        "a winter without snow",
        "the bridge",
    )
    pick = lambda words: words[int(rng.integers(len(words)))]  # noqa: E731
    days = (f"On day {day}, {pick(subjects)} {pick(verbs)} {pick(objects)}." for day in range(1, 200))
    return " ".join(days)


@pytest.fixture(scope="module")
def engine(real_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In full precision, cache included."""
    output = tmp_path_factory.mktemp("engine") / "smollm2-fp32"
    build(real_gguf, output, BuildConfig(recipe="full_prec", kv_cache_dtype="fp32"))
    return output


@pytest.fixture(scope="module")
def steps(engine: Path) -> Iterator[Stepper]:
    executor = open_executor(engine)
    yield Stepper(executor, 400)
    executor.close()


def greedy(steps: Stepper, all_prompts: list[list[int]]) -> list[list[int]]:
    """New tokens of each prompt: prefilled one by one in chunks of 512, then decoded all in the same steps."""
    sequences, tokens = [steps.new() for _ in all_prompts], []
    for sequence, prompt in zip(sequences, all_prompts, strict=True):
        for i in range(0, len(prompt), 512):
            (logits,) = steps.step([(sequence, prompt[i : i + 512], 1)])
        tokens.append([int(logits[-1].argmax())])
    for _ in range(NEW_TOKENS - 1):
        found = steps.step([(s, t[-1:], 1) for s, t in zip(sequences, tokens, strict=True)])
        for new, logits in zip(tokens, found, strict=True):
            new.append(int(logits[-1].argmax()))
    return tokens


def test_greedy_tokens_are_those_of_transformers(
    steps: Stepper, engine: Path, real_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference is fed prompt and our tokens; its best token at every output position must be ours."""
    import torch

    all_prompts = prompts(Tokenizer.load(engine))
    tokens = greedy(steps, all_prompts)
    model = reference(real_gguf)
    wrong, ties = [], []
    for n, (prompt, new) in enumerate(zip(all_prompts, tokens, strict=True)):
        ids = torch.tensor([prompt + new[:-1]])
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=NEW_TOKENS, use_cache=False).logits[0]
        best = logits.topk(2).values
        for at in np.flatnonzero(logits.argmax(-1).numpy() != np.array(new)):
            gap = float(best[at, 0] - best[at, 1])
            found = wrong if gap >= NEAR_TIE else ties
            found.append(f"prompt {n}, token {at}: {new[at]}, the reference's two best are {gap:.2g} apart")
    with capsys.disabled():
        for line in ties:
            print(f"\nnear tie: {line}", end="")
    assert not wrong, "\n".join(wrong)
    assert len(ties) <= 3, "more near ties than chance gives"


def reference(gguf: Path) -> Any:
    """transformers in fp32 on the file's weights, dequantized by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("chunk", [1, 48])
def test_rows_do_not_depend_on_each_other(steps: Stepper, engine: Path, chunk: int) -> None:
    """Bit for bit: chunked and beside others as alone, at the real model's sizes."""
    ids = Tokenizer.load(engine).encode(letter(3))[:96]
    alone = steps.logits(ids)
    sequence, others = steps.new(), [steps.new() for _ in range(5)]
    for i in range(0, len(ids), chunk):
        part = ids[i : i + chunk]
        rows = [
            (sequence, part, len(part)),
            *((other, ids[i : i + 1 + n], 1) for n, other in enumerate(others)),
        ]
        assert np.array_equal(steps.step(rows)[0], alone[i : i + chunk]), i
    for used in (sequence, *others):
        steps.free(used)
