"""Every input and output that clients know, declared once: `config.pbtxt`, request parsing, the tables of
docs/migration.md and the refusal of misspelt JSON keys all derive from here. Standard library only.

Names, types and dimensions are those of the `inflight_batcher_llm` repository that TensorRT-LLM had until mid-2026,
so that its clients go on working. Dimensions are without the batch dimension, -1 is variable.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Use(Enum):
    """What becomes of an input."""

    HONOUR = "honoured"
    IGNORE = "accepted, has no effect"
    REFUSE = "refused if it asks for anything"


class Kind(str, Enum):
    """The models of a repository, by the names that old clients call; `--name PREFIX` goes in front."""

    TOKENS = "tensorrt_llm"  # token ids in and out; holds the engine
    TEXT = "ensemble"  # text in and out
    BLS = "tensorrt_llm_bls"  # the same under its other name
    PREPROCESSING = "preprocessing"
    POSTPROCESSING = "postprocessing"


@dataclass(frozen=True)
class Input:
    """option: what it is called inside trtforge, if not its own name. neutral: the values of a REFUSE input that
    ask for nothing."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    meaning: str
    use: Use = Use.HONOUR
    option: str = ""
    neutral: tuple[Any, ...] = ()
    required: bool = False
    new: bool = False  # not in the old repository

    @property
    def key(self) -> str:
        return self.option or self.name

    @property
    def scalar(self) -> bool:
        return self.dims == (1,)


@dataclass(frozen=True)
class Output:
    name: str
    dtype: str
    dims: tuple[int, ...]
    meaning: str
    new: bool = False


#: What both levels know under the same name.
SAMPLING = (
    Input("temperature", "FP32", (1,), "1; greedy up to 1e-5, and without any of top_k, top_p, min_p"),
    Input("repetition_penalty", "FP32", (1,), "1, off"),
    Input("presence_penalty", "FP32", (1,), "0, off"),
    Input("frequency_penalty", "FP32", (1,), "0, off"),
    Input("min_tokens", "INT32", (1,), "0; no end token before so many"),
    Input("seed", "UINT64", (1,), "absent: a random one"),
    Input("min_length", "INT32", (1,), "`min_tokens` by its older name", option="min_tokens"),
    Input("random_seed", "UINT64", (1,), "`seed` by its older name", option="seed"),
    Input("min_p", "FP32", (1,), "0, off", new=True),
    Input("end_id", "INT32", (1,), "absent: the model's own end tokens; -1 or past the vocabulary: none"),
    Input("pad_id", "INT32", (1,), "nothing is padded", Use.IGNORE),
    Input("beam_width", "INT32", (1,), "1; there is no beam search", Use.REFUSE, neutral=(0, 1)),
    Input(
        "num_return_sequences",
        "INT32",
        (1,),
        "1; several sequences are not done yet",
        Use.REFUSE,
        neutral=(0, 1),
    ),
    Input(
        "exclude_input_in_output",
        "BOOL",
        (1,),
        "true (was false); false puts the prompt first, unless streaming",
    ),
    Input("return_log_probs", "BOOL", (1,), "false; gives `cum_log_probs` and `output_log_probs`"),
    Input(
        "return_context_logits", "BOOL", (1,), "false; logits are not given out", Use.REFUSE, neutral=(False,)
    ),
    Input(
        "return_generation_logits",
        "BOOL",
        (1,),
        "false; logits are not given out",
        Use.REFUSE,
        neutral=(False,),
    ),
    Input("return_perf_metrics", "BOOL", (1,), "false; gives `kv_cache_*` and `*_time_ns`"),
    Input("return_num_input_tokens", "BOOL", (1,), "false; gives `num_input_tokens`"),
    Input("return_num_output_tokens", "BOOL", (1,), "false; gives `num_output_tokens`"),
    Input("ignore_eos", "BOOL", (1,), "false; true goes on past the end tokens", new=True),
    Input("cache_salt", "STRING", (1,), "requests share cached prefixes only under the same salt", new=True),
    Input("deadline_ms", "INT32", (1,), "the request ends with `[DEADLINE]` after so long", new=True),
)

TEXT_INPUTS = (
    Input("text_input", "STRING", (1,), "the prompt; this or `messages`"),
    Input(
        "messages", "STRING", (1,), "JSON list of chat turns; the model's own template is applied", new=True
    ),
    Input("max_tokens", "INT32", (1,), "new tokens, at least 1", required=True),
    Input(
        "stream", "BOOL", (1,), "false: one response; true: one for each step, decoupled repositories only"
    ),
    Input("stop_words", "STRING", (-1,), 'texts that end the answer; `""` is none'),
    Input("bad_words", "STRING", (-1,), 'texts that may not appear; `""` is none'),
    Input("top_k", "INT32", (1,), "0, off; greedy if neither top_k, top_p nor min_p is given"),
    Input("top_p", "FP32", (1,), "0, off"),
    Input("embedding_bias_words", "STRING", (-1,), "words whose tokens' logits are changed"),
    Input("embedding_bias_weights", "FP32", (-1,), "by so much, one for each word"),
    Input("length_penalty", "FP32", (1,), "for beams only", Use.IGNORE),
    Input("decoder_text_input", "STRING", (1,), "for encoder-decoder models only", Use.REFUSE, neutral=("",)),
    *SAMPLING,
)

BLS_INPUTS = (
    *TEXT_INPUTS,
    Input("num_draft_tokens", "INT32", (1,), "0; draft models are not done yet", Use.REFUSE, neutral=(0,)),
    Input(
        "use_draft_logits", "BOOL", (1,), "false; draft models are not done yet", Use.REFUSE, neutral=(False,)
    ),
)

TOKEN_INPUTS = (
    Input(
        "input_ids", "INT32", (-1,), "the prompt's token ids, padded on the right in a batch", required=True
    ),
    Input("input_lengths", "INT32", (1,), "how many of them count; absent: all"),
    Input("request_output_len", "INT32", (1,), "new tokens, at least 1", option="max_tokens", required=True),
    Input("streaming", "BOOL", (1,), "false: one response; true: one for each step", option="stream"),
    Input(
        "stop",
        "BOOL",
        (1,),
        "true ends the running requests with the same request id, those to the text models too; "
        "they answer what they have",
    ),
    Input(
        "stop_words_list",
        "INT32",
        (2, -1),
        "row 0: ids of all words; row 1: their end offsets, padded with -1",
    ),
    Input("bad_words_list", "INT32", (2, -1), "likewise; sequences that may not appear"),
    Input(
        "runtime_top_k",
        "INT32",
        (1,),
        "0, off; greedy if neither top-k, top-p nor min_p is given",
        option="top_k",
    ),
    Input("runtime_top_p", "FP32", (1,), "0, off", option="top_p"),
    Input("embedding_bias", "FP32", (-1,), "added to the logits; empty or one for each id of the vocabulary"),
    Input("runtime_top_p_min", "FP32", (1,), "never had an effect", Use.IGNORE),
    Input("runtime_top_p_decay", "FP32", (1,), "top-p stays as it is", Use.IGNORE),
    Input("runtime_top_p_reset_ids", "INT32", (1,), "for top-p decay only", Use.IGNORE),
    Input("len_penalty", "FP32", (1,), "for beams only", Use.IGNORE),
    Input("early_stopping", "BOOL", (1,), "for beams only", Use.IGNORE),
    Input("beam_search_diversity_rate", "FP32", (1,), "for beams only", Use.IGNORE),
    Input("decoder_input_ids", "INT32", (-1,), "sent by old clients to decoder-only models too", Use.IGNORE),
    Input("decoder_input_lengths", "INT32", (1,), "likewise", Use.IGNORE),
    Input(
        "retention_token_range_starts",
        "INT32",
        (-1,),
        "a hint; the cache evicts what was used longest ago. Lists of unequal length are refused",
        Use.IGNORE,
    ),
    Input("retention_token_range_ends", "INT32", (-1,), "likewise", Use.IGNORE),
    Input("retention_token_range_priorities", "INT32", (-1,), "likewise", Use.IGNORE),
    Input("retention_token_range_durations_ms", "INT32", (-1,), "likewise", Use.IGNORE),
    Input("retention_decode_priority", "INT32", (1,), "likewise", Use.IGNORE),
    Input("retention_decode_duration_ms", "INT32", (1,), "likewise", Use.IGNORE),
    *SAMPLING,
)

PREPROCESSING_INPUTS = (
    Input("QUERY", "STRING", (1,), "the prompt", required=True),
    Input("REQUEST_OUTPUT_LEN", "INT32", (1,), "passed on", required=True),
    Input("DECODER_QUERY", "STRING", (1,), "tokenized into DECODER_INPUT_ID"),
    Input("BAD_WORDS_DICT", "STRING", (-1,), "as token ids into BAD_WORDS_IDS"),
    Input("STOP_WORDS_DICT", "STRING", (-1,), "as token ids into STOP_WORDS_IDS"),
    Input("EMBEDDING_BIAS_WORDS", "STRING", (-1,), "into EMBEDDING_BIAS"),
    Input("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,), "into EMBEDDING_BIAS"),
    Input("END_ID", "INT32", (1,), "passed on; absent: the model's own"),
    Input("PAD_ID", "INT32", (1,), "passed on; absent: the model's own"),
)

POSTPROCESSING_INPUTS = (
    Input("TOKENS_BATCH", "INT32", (-1, -1), "token ids, a row for each sequence", required=True),
    Input("SEQUENCE_LENGTH", "INT32", (-1,), "how many of each row count", required=True),
)

#: What both levels answer beside the text or the ids.
REPORT = (
    Output("cum_log_probs", "FP32", (-1,), "`[1, 1]`, with return_log_probs: the sum so far"),
    Output(
        "output_log_probs", "FP32", (-1, -1), "`[1, 1, n]`, with return_log_probs: of this response's tokens"
    ),
    Output("context_logits", "FP32", (-1, -1), "never sent"),
    Output("generation_logits", "FP32", (-1, -1, -1), "never sent"),
    Output("batch_index", "INT32", (1,), "which prompt of the batch, only if it had several"),
    Output("sequence_index", "INT32", (1,), "never sent"),
    Output("num_input_tokens", "INT32", (1,), "with its flag"),
    Output("num_output_tokens", "INT32", (1,), "with its flag: of this response only"),
    Output("kv_cache_alloc_new_blocks", "INT32", (1,), "last response, with return_perf_metrics"),
    Output("kv_cache_reused_blocks", "INT32", (1,), "likewise"),
    Output("kv_cache_alloc_total_blocks", "INT32", (1,), "likewise"),
    Output("arrival_time_ns", "INT64", (1,), "likewise, on a monotonic clock"),
    Output("first_scheduled_time_ns", "INT64", (1,), "likewise"),
    Output("first_token_time_ns", "INT64", (1,), "likewise"),
    Output("last_token_time_ns", "INT64", (1,), "likewise"),
    Output("acceptance_rate", "FP32", (1,), "never sent: no draft tokens yet"),
    Output("total_accepted_draft_tokens", "INT32", (1,), "never sent"),
    Output("total_draft_tokens", "INT32", (1,), "never sent"),
    Output("finish_reason", "STRING", (-1,), "`[1]`, last response: stop, length or cancelled", new=True),
    Output(
        "stop_reason",
        "STRING",
        (-1,),
        "`[1]`, last response: the stop word or token id that ended it",
        new=True,
    ),
)

TEXT_OUTPUTS = (
    Output("text_output", "STRING", (-1,), "`[1]`, without a batch dimension; a delta if streaming"),
    *REPORT,
)
TOKEN_OUTPUTS = (
    Output("output_ids", "INT32", (-1, -1), "`[1, 1, n]`; only the new ones if streaming"),
    Output("sequence_length", "INT32", (-1,), "`[1, 1]`: n, which may be 0 in a last response"),
    *REPORT,
)
PREPROCESSING_OUTPUTS = (
    Output("INPUT_ID", "INT32", (-1,), "padded on the right"),
    Output("REQUEST_INPUT_LEN", "INT32", (1,), ""),
    Output("DECODER_INPUT_ID", "INT32", (-1,), ""),
    Output("REQUEST_DECODER_INPUT_LEN", "INT32", (1,), ""),
    Output("BAD_WORDS_IDS", "INT32", (2, -1), ""),
    Output("STOP_WORDS_IDS", "INT32", (2, -1), ""),
    Output("EMBEDDING_BIAS", "FP32", (-1,), "empty without words"),
    Output("REQUEST_OUTPUT_LEN", "INT32", (-1,), ""),
    Output("OUT_END_ID", "INT32", (1,), "END_ID, or the model's first end token; -1 without any"),
    Output("OUT_PAD_ID", "INT32", (1,), ""),
)
POSTPROCESSING_OUTPUTS = (Output("OUTPUT", "STRING", (-1,), "one text for each sequence"),)

INPUTS: dict[Kind, tuple[Input, ...]] = {
    Kind.TOKENS: TOKEN_INPUTS,
    Kind.TEXT: TEXT_INPUTS,
    Kind.BLS: BLS_INPUTS,
    Kind.PREPROCESSING: PREPROCESSING_INPUTS,
    Kind.POSTPROCESSING: POSTPROCESSING_INPUTS,
}
OUTPUTS: dict[Kind, tuple[Output, ...]] = {
    Kind.TOKENS: TOKEN_OUTPUTS,
    Kind.TEXT: TEXT_OUTPUTS,
    Kind.BLS: TEXT_OUTPUTS,
    Kind.PREPROCESSING: PREPROCESSING_OUTPUTS,
    Kind.POSTPROCESSING: POSTPROCESSING_OUTPUTS,
}

#: JSON keys that are no tensor of ours reach a model as request parameters. These ask for nothing that is not done
#: anyway, or are set by Triton's own clients.
PARAMETERS_IGNORED = ("accumulate_tokens", "Streaming", "id", "binary_data_output")

_LORA, _GUIDED, _DRAFT = (
    "LoRA adapters are not done yet",
    "guided decoding is not done yet",
    "draft tokens are not done yet",
)
_PROMPT_TABLE, _IMAGES = "prompt tuning is not done", "images and video are not done"
_DISAGGREGATED, _ENCODER = "disaggregated serving is not done", "encoder-decoder models are not done"

#: Inputs of the old repository that are not declared: as a tensor Triton refuses them by name, as a key we do.
UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_id"), _PROMPT_TABLE),
    "prompt_table_extra_ids": _PROMPT_TABLE,
    **dict.fromkeys(("lora_task_id", "lora_weights", "lora_config"), _LORA),
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide"), _GUIDED),
    **dict.fromkeys(("draft_input_ids", "draft_logits", "draft_acceptance_threshold"), _DRAFT),
    **dict.fromkeys(
        ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"), _DRAFT
    ),
    **dict.fromkeys(("image_input", "image_url_input", "image_bytes_input", "video_bytes_input"), _IMAGES),
    **dict.fromkeys(("mrope_rotary_cos_sin", "mrope_position_deltas"), _IMAGES),
    **dict.fromkeys(("encoder_input_features", "encoder_output_lengths", "cross_attention_mask"), _ENCODER),
    "skip_cross_attn_blocks": _ENCODER,
    **dict.fromkeys(("context_phase_params", "request_type"), _DISAGGREGATED),
}

#: What other servers call things: as an unknown key each would be ignored without a word.
ELSEWHERE = {
    "prompt": "text_input",
    "inputs": "text_input",
    "query": "text_input",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "request_output_len": "max_tokens",
    "stop": "stop_words",
    "stop_sequences": "stop_words",
    "n": "num_return_sequences",
    "best_of": "num_return_sequences",
    "num_beams": "beam_width",
    "len_penalty": "length_penalty",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "streaming": "stream",
    "logprobs": "return_log_probs",
    "logit_bias": "embedding_bias_words",
    "add_generation_prompt": "messages",
}


def inputs_by_name(kind: Kind) -> dict[str, Input]:
    return {i.name: i for i in INPUTS[kind]}


def options_of(kind: Kind) -> dict[str, Input]:
    """Scalar inputs by name: those that a request parameter may give."""
    return {i.name: i for i in INPUTS[kind] if i.scalar}
