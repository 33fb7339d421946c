"""plan: what a model will need before anything is built, from its config and tensor headers alone.

The sizes of KV cache and weights are exact, the workspace is an estimate, and times are floors: the bytes
that a decode step must read, over the memory's bandwidth.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from trtforge.builder import recipes
from trtforge.builder.blocks import BlockFormat, format_of
from trtforge.builder.describe import elements
from trtforge.builder.devices import Device
from trtforge.builder.spec import BuildConfig, ModelSpec, QuantSpec
from trtforge.builder.units import format_bytes
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.manifest import KVLayout

#: How the checkpoint has the weights that are quantized there (Translation.formats).
Formats = Mapping[str, BlockFormat]


@dataclass(frozen=True)
class RecipePlan:
    """weight_bytes: in memory; step_bytes: read by a decode step (an untied embedding is only looked up)."""

    name: str
    weight_bytes: int
    step_bytes: int
    impossible: str | None = None


@dataclass(frozen=True)
class KVPlan:
    name: str
    bytes_per_token: int
    block_bytes: int
    impossible: str | None = None


@dataclass(frozen=True)
class ContextPlan:
    """users: requests of `context` tokens that the pool holds. The rest is about a decode step in which
    `batch` of them, no more than max_batch_size, are all at their full context."""

    context: int
    users: int
    batch: int
    step_seconds: float
    tokens_per_s: float
    single_tokens_per_s: float  # with one request alone


@dataclass(frozen=True)
class Plan:
    """All sizes in bytes. `impossible` says why what was asked cannot be, and is empty if it can."""

    model: str
    family: str
    architecture: str
    parameters: int
    max_position_embeddings: int
    device: Device
    recipe: str
    kv_cache_dtype: str
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    weight_bytes: int
    workspace_bytes: int
    pool_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    kv_tokens: int
    contexts: tuple[ContextPlan, ...]
    recipes: tuple[RecipePlan, ...]
    kv_dtypes: tuple[KVPlan, ...]
    impossible: tuple[str, ...]

    def to_json(self) -> Mapping[str, Any]:
        return asdict(self)


def plan_recipe(spec: ModelSpec, quant: QuantSpec, device: Device, formats: Formats) -> RecipePlan:
    """Matrices as the quantize pass stores them; norms and biases as they are. A tied embedding is the head."""
    total = looked_up = 0
    for weight, shape in spec.weight_shapes().items():
        is_table = weight == "embedding.weight"
        only_table = is_table and not spec.tied_embeddings
        linear = "lm_head" if is_table and not only_table else weight.removesuffix(".weight")
        plain = len(shape) == 1 or linear in quant.exclude
        fmt = None if plain else format_of(quant, weight, shape[1], formats.get(weight))
        size = fmt.bytes(shape[0], shape[1]) if fmt else elements(shape) * device.float_bytes
        total += size
        looked_up += size if only_table else 0
    return RecipePlan(quant.name, total, total - looked_up)


def plan_kv(spec: ModelSpec, dtype: str, tokens_per_block: int, device: Device) -> KVPlan:
    layout = KVLayout(dtype, tokens_per_block, spec.kv_groups)
    block = sum(layout.block_bytes(g) for g in range(len(layout.groups)))
    impossible = None
    if dtype == "bf16" and device.sm is not None and device.sm < 80:
        impossible = f"{device.name} (SM {device.sm}) has no bf16 arithmetic; choose fp16"
    return KVPlan(dtype, layout.bytes_per_token, block, impossible)


def workspace_bytes(spec: ModelSpec, config: BuildConfig, device: Device) -> int:
    """An estimate of a step's activations: one layer's values for each token, logits for each request."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    widths = 3 * spec.hidden_size + 3 * spec.intermediate_size + heads * spec.head_size
    tokens, rows = config.limits.max_num_tokens, config.limits.max_batch_size
    return tokens * widths * device.float_bytes + rows * spec.vocab_size * 4


def kv_read_bytes(spec: ModelSpec, dtype: str, context: int) -> int:
    """That attention of one new token at `context` reads: a layer with a window reads no more than that."""
    per_token = KVLayout(dtype, 1, spec.kv_groups)
    return sum(
        per_token.block_bytes(g) * min(context, group.window or context)
        for g, group in enumerate(per_token.groups)
    )


def plan(
    spec: ModelSpec, config: BuildConfig, device: Device, formats: Formats = MappingProxyType({})
) -> Plan:
    """config: settled (builder/build.py). Raises InvalidArgument for an unknown recipe."""
    quants = [recipes.load(name) for name in recipes.names() if name != "as_is" or formats]
    chosen = recipes.load(config.recipe)
    if chosen not in quants:
        quants.append(chosen)
    recipe_plans = tuple(plan_recipe(spec, quant, device, formats) for quant in quants)
    recipe = next(r for r, quant in zip(recipe_plans, quants, strict=True) if quant == chosen)

    dtype = config.kv_cache_dtype
    kv_plans = tuple(plan_kv(spec, name, config.tokens_per_block, device) for name in KV_DTYPES)
    kv = next(k for k in kv_plans if k.name == dtype)

    workspace = workspace_bytes(spec, config, device)
    pool = max(0, device.memory - recipe.weight_bytes - workspace)
    blocks = pool // kv.block_bytes
    contexts = tuple(
        plan_context(spec, config, device, recipe, dtype, blocks, context)
        for context in context_steps(config.limits.max_seq_len)
    )
    return Plan(
        model=spec.name,
        family=spec.family,
        architecture=spec.architecture,
        parameters=spec.num_parameters(),
        max_position_embeddings=spec.max_position_embeddings,
        device=device,
        recipe=recipe.name,
        kv_cache_dtype=dtype,
        tokens_per_block=config.tokens_per_block,
        **asdict(config.limits),
        weight_bytes=recipe.weight_bytes,
        workspace_bytes=workspace,
        pool_bytes=blocks * kv.block_bytes,
        kv_bytes_per_token=kv.bytes_per_token,
        num_blocks=blocks,
        kv_tokens=blocks * config.tokens_per_block,
        contexts=contexts,
        recipes=recipe_plans,
        kv_dtypes=kv_plans,
        impossible=tuple(impossibilities(config, device, recipe, kv, workspace, blocks)),
    )


def plan_context(
    spec: ModelSpec,
    config: BuildConfig,
    device: Device,
    recipe: RecipePlan,
    dtype: str,
    blocks: int,
    context: int,
) -> ContextPlan:
    users = blocks // -(-context // config.tokens_per_block)
    batch = min(users, config.limits.max_batch_size)
    read = kv_read_bytes(spec, dtype, context)
    step = (recipe.step_bytes + batch * read) / device.bandwidth
    single = (recipe.step_bytes + read) / device.bandwidth
    return ContextPlan(context, users, batch, step, batch / step, 1 / single if users else 0.0)


def context_steps(longest: int) -> list[int]:
    """Powers of two from 512 on, and the longest: no more than six of them."""
    steps = [2**n for n in range(9, 31) if 2**n < longest]
    return [*steps[-5:], longest]


def impossibilities(
    config: BuildConfig, device: Device, recipe: RecipePlan, kv: KVPlan, workspace: int, blocks: int
) -> list[str]:
    """Why what was asked cannot be, each with the numbers and what would do."""
    reasons = [reason for reason in (recipe.impossible, kv.impossible) if reason]
    longest = config.limits.max_seq_len
    needed = recipe.weight_bytes + workspace
    if needed > device.memory:
        reasons.append(
            f"weights ({format_bytes(recipe.weight_bytes)}) and workspace ({format_bytes(workspace)}) exceed "
            f"the {format_bytes(device.memory)} of {device.name}; choose a smaller recipe, or another device"
        )
    elif blocks * config.tokens_per_block < longest:
        reasons.append(
            f"one request of {longest} tokens needs {format_bytes(longest * kv.bytes_per_token)} KV cache, "
            f"{format_bytes(blocks * kv.block_bytes)} are left: {blocks * config.tokens_per_block} tokens; "
            f"lower --max-seq-len, or choose a smaller --kv-cache-dtype or recipe"
        )
    return reasons


def as_text(p: Plan) -> str:
    """For people."""
    lines = [
        f"{p.model}: {p.architecture}, {p.parameters / 1e6:.0f} M parameters",
        f"on {p.device.name}: {format_bytes(p.device.memory)} of memory, {p.device.bandwidth / 1e9:.1f} GB/s",
        "",
        f"{'weights':12}{format_bytes(p.weight_bytes):>10}   recipe {p.recipe}",
        f"{'workspace':12}{format_bytes(p.workspace_bytes):>10}   estimate, {p.max_num_tokens} tokens a step",
        f"{'KV cache':12}{format_bytes(p.pool_bytes):>10}   {p.kv_cache_dtype}, {p.kv_bytes_per_token} bytes "
        f"per token: {p.kv_tokens} tokens in {p.num_blocks} blocks of {p.tokens_per_block}",
        "",
        "decoding, floors by memory bandwidth:",
        f"{'context':>9}{'users':>8}{'one alone':>14}{'batch':>8}{'step':>12}{'together':>14}",
    ]
    for c in p.contexts:
        lines.append(
            f"{c.context:>9}{c.users:>8}{c.single_tokens_per_s:>10.0f} t/s{c.batch:>8}"
            f"{c.step_seconds * 1e3:>9.2f} ms{c.tokens_per_s:>10.0f} t/s"
        )
    lines += ["", "recipe      " + ", ".join(f"{r.name} {format_bytes(r.weight_bytes)}" for r in p.recipes)]
    lines += ["KV dtype    " + ", ".join(f"{k.name} {k.bytes_per_token} B/token" for k in p.kv_dtypes)]
    reasons = [r.impossible for r in p.recipes] + [k.impossible for k in p.kv_dtypes]
    lines += [f"not here: {reason}" for reason in reasons if reason and reason not in p.impossible]
    return "\n".join([*lines, *(f"impossible: {reason}" for reason in p.impossible)])
