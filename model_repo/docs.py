"""docs/migration.md, made from the declarations: `python -m trtforge.model_repo.docs > docs/migration.md`. A test
holds it current.
"""

from collections.abc import Iterable, Sequence

from trtforge.model_repo.metrics import DISTRIBUTIONS, FAMILIES
from trtforge.model_repo.parameters import PARAMETERS, Rule
from trtforge.model_repo.tensors import (
    ELSEWHERE,
    INPUTS,
    OUTPUTS,
    PARAMETERS_IGNORED,
    TEXT_INPUTS,
    UNSUPPORTED,
    Input,
    Kind,
    Output,
)

TOP = """\
# Coming from the `inflight_batcher_llm` repository

Clients of the Triton repository that TensorRT-LLM had until mid-2026 go on working: the models `tensorrt_llm`,
`ensemble`, `tensorrt_llm_bls`, `preprocessing` and `postprocessing` have the same tensors, and each of the first three
may be called directly. The tables below are generated from the declarations in `model_repo/`
(`python -m trtforge.model_repo.docs > docs/migration.md`).

## What differs on purpose

- The prompt is not repeated in the answer. `exclude_input_in_output` false, in the request or as a parameter in
  `config.pbtxt`, brings it back (not in streams). A client that cuts `len(prompt)` characters off must stop doing so.
- A stop word is not part of the answer.
- Sampling without a seed is random; it used the seed 0.
- `end_id` absent means the model's own list of end tokens, at the token level too (there it meant none). -1 means none.
- `min_tokens` absent means 0; it meant 1.
- Errors have codes: the client's faults are INVALID_ARG (400), a full queue is UNAVAILABLE (503); all were INTERNAL.
  The message begins with a code word, since that is all that `generate` and streams pass on (see below).
- An unknown JSON key that is nearly an input's name is refused; it was ignored.
- A list of words may have 1,024 entries: each costs time in every step, of all requests.
- `kv_cache_*` numbers and `*_time_ns` come with a request's last response only.
- Batching, paged KV cache, chunked prefill and cancellation need no configuration, and work with
  `--decoupled-mode false` too. A repository that is not decoupled refuses `stream` and batches of several prompts.

As before, a request that sends none of `top_k`, `top_p` and `min_p` is greedy, whatever its `temperature`.

## Getting there

    trtforge build MODEL -o ENGINE        # where trtllm-build was
    trtforge package ENGINE -o REPO       # where the templates were filled in; --decoupled-mode false for infer()
    trtforge check REPO
    trtforge serve REPO                   # or: tritonserver --model-repository=REPO, with trtforge installed

`--parameter KEY=VALUE` of `package` takes the parameters of the table at the end.

## Error code words

| begins with | meaning | `/infer` | unary gRPC |
| --- | --- | --- | --- |
| `[INVALID_ARG]` | the request's fault | 400 | INVALID_ARGUMENT |
| `[OVERLOADED] retry_after_ms=N` | the queue is full; send it again after N milliseconds | 503 | UNAVAILABLE |
| `[UNAVAILABLE]` | the engine model is not loaded | 503 | UNAVAILABLE |
| `[DEADLINE]` | the request's `deadline_ms` has passed | 503 | UNAVAILABLE |
| `[CANCELLED]` | the client went away | | CANCELLED |
| `[INTERNAL]` | our fault | 500 | INTERNAL |

On `generate` and `generate_stream` Triton makes each of them a 400, and in a stream that has begun an object with
`error`. A tensor that is not declared, and JSON of the wrong type, are refused by Triton itself, in its own words.

## Clients that go away

A gRPC stream or call that is cancelled, and an event stream that is disconnected, free everything that their request
held within a step, on each of the three names. A plain HTTP request without streaming cannot be seen to leave (Triton
does not tell a model): `deadline_ms`, or the parameter `default_deadline_ms`, bounds it.

## When the engine fails

A step that fails ends its own requests with `[INTERNAL]`; the others go on. If the engine itself is lost, every request
fails at once, and `trtforge_engine_healthy` is 0. Triton has no way for a model to say that it is not ready any more:
`/v2/health/ready` stays 200. Watch that metric, or probe with a real request; loading the model again, or starting the
server again, mends it.
"""


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([row(*head), row(*("---" for _ in head)), *(row(*r) for r in rows)]) + "\n"


def dims(of: Input | Output) -> str:
    return "[" + ", ".join(map(str, of.dims)) + "]"


def inputs(declared: Sequence[Input]) -> str:
    return table(
        ("input", "type", "dims", "what becomes of it", "absent means; meaning"),
        ((f"`{i.name}`{' (new)' * i.new}", i.dtype, dims(i), i.use.value, i.meaning) for i in declared),
    )


def outputs(declared: Sequence[Output]) -> str:
    return table(
        ("output", "type", "dims", "sent"),
        ((f"`{o.name}`{' (new)' * o.new}", o.dtype, dims(o), o.meaning) for o in declared),
    )


def names(some: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in some)


def unsupported() -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in UNSUPPORTED.items():
        reasons.setdefault(reason, []).append(name)
    return "\n".join(f"- {names(n)}: {reason}." for reason, n in reasons.items()) + "\n"


def parameters(rule: Rule) -> str:
    head = ("parameter", "meaning" if rule is Rule.HONOUR else "why")
    return table(head, ((f"`{p.key}`{' (new)' * p.new}", p.meaning) for p in PARAMETERS if p.rule is rule))


def metrics() -> str:
    rows = [
        (f"`{f.name}`", f.kind.lower(), f"`{f.label}`: " + ", ".join(f.values) if f.label else "")
        for f in FAMILIES
    ]
    for d in DISTRIBUTIONS:
        rows.append((f"`{d.name}`", "histogram", ", ".join(f"`{k}`: {v}" for k, v in d.labels.items())))
    return table(("family", "kind", "labels besides `model` and `version`"), rows)


def markdown() -> str:
    bls_only = [i for i in INPUTS[Kind.BLS] if i not in TEXT_INPUTS]
    sections = [
        TOP,
        "## Inputs of `ensemble` and `tensorrt_llm_bls`\n",
        "Dimensions are without the batch dimension, which every tensor has.\n",
        inputs(TEXT_INPUTS),
        "Of `tensorrt_llm_bls` only:\n",
        inputs(bls_only),
        "## Inputs of `tensorrt_llm`\n",
        inputs(INPUTS[Kind.TOKENS]),
        "## Outputs\n",
        "Only what is requested and applies is sent; the rest is absent.\n",
        outputs(OUTPUTS[Kind.TEXT]),
        "`tensorrt_llm` has, in the place of `text_output`:\n",
        outputs([o for o in OUTPUTS[Kind.TOKENS] if o not in OUTPUTS[Kind.TEXT]]),
        "## `preprocessing` and `postprocessing`\n",
        inputs(INPUTS[Kind.PREPROCESSING]),
        outputs(OUTPUTS[Kind.PREPROCESSING]),
        inputs(INPUTS[Kind.POSTPROCESSING]),
        outputs(OUTPUTS[Kind.POSTPROCESSING]),
        "## JSON keys and request parameters that are no input\n",
        "Honoured: every scalar input's own name.\n",
        f"Ignored: {names(PARAMETERS_IGNORED)}, and names that resemble nothing: "
        "a proxy may turn headers into parameters.\n",
        "Refused with a hint: misspelt inputs, and what other servers call them:\n",
        f"{names(ELSEWHERE)}.\n",
        "Refused by name:\n",
        unsupported(),
        "## Parameters of `config.pbtxt`\n",
        "Honoured:\n",
        parameters(Rule.HONOUR),
        "Accepted without effect:\n",
        parameters(Rule.IGNORE),
        "Refused if set to anything that asks for them:\n",
        parameters(Rule.REFUSE),
        "Any other key is an error that `check` names.\n",
        "## Metrics\n",
        metrics(),
    ]
    return "\n".join(sections)


if __name__ == "__main__":
    print(markdown(), end="")
