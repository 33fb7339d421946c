"""The models without an engine of their own: `ensemble`, `tensorrt_llm_bls`, `preprocessing`, `postprocessing`.

They reach the engine model's process through a local socket. None is a platform ensemble: through one, a client
that goes away is not seen.
"""

import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trtforge.model_repo import parse
from trtforge.model_repo.answer import strings
from trtforge.model_repo.link import SocketPort
from trtforge.model_repo.model import CODES, Front, log_to_triton
from trtforge.model_repo.parameters import ModelOptions, of_model
from trtforge.model_repo.tensors import Kind, inputs_by_name
from trtforge.model_repo.wire import code_word
from trtforge.plugins.errors import EngineFailure, ForgeError, InvalidArgument

log = logging.getLogger(__name__)


class TextModel(Front):
    kind = Kind.TEXT

    def open_port(self, args: dict[str, str], options: ModelOptions) -> SocketPort:
        return SocketPort(options.engine_model, self.deliver)


class BlsModel(TextModel):
    kind = Kind.BLS


class TokenizerModel:
    """A TritonPythonModel that answers at once, row by row."""

    kind: ClassVar[Kind]

    def initialize(self, args: dict[str, str]) -> None:
        self.pb: Any = importlib.import_module("triton_python_backend_utils")
        log_to_triton(self.pb, args["model_name"])
        try:
            options, _ = of_model(args["model_config"])
        except ForgeError as e:
            raise self.pb.TritonModelException(e.wire_message()) from e
        self.port = SocketPort(options.engine_model, lambda _: None)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(r) for r in requests]

    def finalize(self) -> None:
        self.port.close()

    def _respond(self, request: Any) -> Any:
        try:
            given = {t.name(): t.as_numpy() for t in request.inputs()}
            outputs = self.answer(rows(self.kind, given, json.loads(request.parameters() or "{}")))
        except ForgeError as e:
            return self._failure(e)
        except Exception as e:  # ours: the other requests of the batch are answered all the same
            log.exception("answering a request")
            return self._failure(EngineFailure(f"{type(e).__name__}: {e}"))
        wanted = request.requested_output_names()
        return self.pb.InferenceResponse([self.pb.Tensor(n, a) for n, a in outputs.items() if n in wanted])

    def _failure(self, error: ForgeError) -> Any:
        code = getattr(self.pb.TritonError, CODES.get(code_word(error), "INTERNAL"))
        message = self.pb.TritonError(" ".join(error.wire_message().split()), code)
        return self.pb.InferenceResponse(output_tensors=[], error=message)

    def answer(self, rows: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        raise NotImplementedError


def rows(
    kind: Kind, given: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The plain values of each row of a batch."""
    shared, declared = parse.read_parameters(kind, parameters), inputs_by_name(kind)
    for i in declared.values():
        if i.required and i.name not in given and i.name not in shared:
            raise InvalidArgument(f"{i.name} is missing")
    return [parse.row_options(declared, given, r, shared) for r in range(parse.batch_size(given))]


class Preprocessing(TokenizerModel):
    """Text to token ids, with the special tokens of the tokenizer's own rule."""

    kind = Kind.PREPROCESSING

    def answer(self, rows: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        facts = self.port.facts()
        ids = [self.port.encode(r["QUERY"], True) for r in rows]
        decoder = [self.port.encode(r["DECODER_QUERY"], True) if r.get("DECODER_QUERY") else [] for r in rows]
        return {
            "INPUT_ID": padded(ids, facts.pad_id),
            "REQUEST_INPUT_LEN": column([len(i) for i in ids]),
            "DECODER_INPUT_ID": padded(decoder, facts.pad_id),
            "REQUEST_DECODER_INPUT_LEN": column([len(i) for i in decoder]),
            "BAD_WORDS_IDS": word_lists([self._words("BAD_WORDS_DICT", r) for r in rows]),
            "STOP_WORDS_IDS": word_lists([self._words("STOP_WORDS_DICT", r) for r in rows]),
            "EMBEDDING_BIAS": self._bias(rows, facts.vocab_size),
            "REQUEST_OUTPUT_LEN": column([r["REQUEST_OUTPUT_LEN"] for r in rows]),
            "OUT_END_ID": column([r.get("END_ID", facts.end_id) for r in rows]),
            "OUT_PAD_ID": column([r.get("PAD_ID", facts.pad_id) for r in rows]),
        }

    def _words(self, name: str, row: dict[str, Any]) -> list[list[int]]:
        encoded = [self.port.encode(w, False) for w in parse.words(row, name)]
        return [ids for ids in encoded if ids]

    def _bias(self, rows: list[dict[str, Any]], vocab_size: int) -> NDArray[Any]:
        """FP32 [B, vocab], or [B, 0] if no row has words."""
        pairs = [
            parse.read_bias_words(
                {
                    "embedding_bias_words": r.get("EMBEDDING_BIAS_WORDS", []),
                    "embedding_bias_weights": r.get("EMBEDDING_BIAS_WEIGHTS", []),
                }
            )
            for r in rows
        ]
        bias = np.zeros((len(rows), vocab_size if any(pairs) else 0), np.float32)
        for row, words in enumerate(pairs):
            for word, weight in words:
                for token in self.port.encode(word, False):
                    bias[row, token] += weight
        return bias


class Postprocessing(TokenizerModel):
    """Token ids to text, without special tokens."""

    kind = Kind.POSTPROCESSING

    def answer(self, rows: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        texts = []
        for row in rows:
            for ids, length in zip(row["TOKENS_BATCH"], row["SEQUENCE_LENGTH"], strict=False):
                texts.append(self.port.decode([i for i in ids[: max(length, 0)] if i >= 0]))
        return {"OUTPUT": strings(*texts)}


def column(values: Sequence[int]) -> NDArray[Any]:
    return np.array(values, np.int32).reshape(-1, 1)


def padded(ids: Sequence[Sequence[int]], pad: int) -> NDArray[Any]:
    """[B, longest], padded on the right."""
    width = max(len(i) for i in ids)
    return np.array([[*i, *([pad] * (width - len(i)))] for i in ids], np.int32)


def word_lists(words: Sequence[Sequence[Sequence[int]]]) -> NDArray[Any]:
    """[B, 2, n]: ids of all words, padded with 0; their end offsets, padded with -1."""
    flat = [[t for w in row for t in w] for row in words]
    width = max(1, *(len(f) for f in flat))
    out = np.zeros((len(words), 2, width), np.int32)
    out[:, 1] = -1
    for i, row in enumerate(words):
        out[i, 0, : len(flat[i])] = flat[i]
        out[i, 1, : len(row)] = np.cumsum([len(w) for w in row])
    return out
