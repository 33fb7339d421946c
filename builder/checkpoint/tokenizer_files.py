"""The tokenizer of a Hugging Face directory: tokenizer.json, and what tokenizer_config.json says of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.builder.checkpoint.base import TokenizerFiles
from trtforge.builder.checkpoint.huggingface import MAX_JSON_BYTES, read_json
from trtforge.builder.checkpoint.sentencepiece_model import read_sentencepiece
from trtforge.builder.checkpoint.tokenizer_build import Vocabulary, sentencepiece
from trtforge.plugins.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: tokens that a SentencePiece model does not have stand in tokenizer_config.json; more than that is an attack
MAX_ADDED_TOKENS = 100_000


def tokenizer_of_directory(path: Path, config: Mapping[str, Any]) -> TokenizerFiles:
    """config: config.json, asked for special tokens where no tokenizer file names them.

    tokenizer.json is kept byte for byte, its post-processor too: like transformers, it is believed about BOS and EOS
    around plain text, not `add_bos_token` of tokenizer_config.json, which is for tokenizer.model alone. Raises
    CheckpointError for a damaged or missing one.
    """
    settings = _optional_json(path / "tokenizer_config.json")
    if (path / "tokenizer.json").is_file():
        data, tokenizer = _read_tokenizer_json(path / "tokenizer.json")
    elif (path / "tokenizer.model").is_file():
        tokenizer = _from_sentencepiece(path / "tokenizer.model", settings)
        data = tokenizer.to_str().encode()
    else:
        raise CheckpointError(
            f"{path}: has neither tokenizer.json nor tokenizer.model; copy the tokenizer of the model beside it "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes tokenizer.json)"
        )
    settings = {**_optional_json(path / "special_tokens_map.json"), **settings}
    ids = {which: _special_id(tokenizer, settings, config, which) for which in ("bos", "eos", "pad")}
    return TokenizerFiles(
        tokenizer_json=data,
        chat_template=_chat_template(path, settings),
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        pad_token_id=ids["pad"],
        add_bos_token=_adds_bos(tokenizer, ids["bos"]),
    )


def _read_tokenizer_json(path: Path) -> tuple[bytes, "Tokenizer"]:
    from tokenizers import Tokenizer

    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: over {MAX_JSON_BYTES} bytes, which no tokenizer needs")
    data = path.read_bytes()
    try:
        return data, Tokenizer.from_buffer(data)
    except Exception as e:  # the library raises bare Exceptions for anything that it cannot read
        raise CheckpointError(
            f"{path}: not a tokenizer.json that can be read ({str(e)[:200]}); download it again"
        ) from e


def _from_sentencepiece(path: Path, settings: Mapping[str, Any]) -> "Tokenizer":
    """Llama's rules: BPE, byte fallback, BOS in front unless tokenizer_config.json says otherwise."""
    from tokenizers import AddedToken

    model = read_sentencepiece(path)
    tokenizer = sentencepiece(
        Vocabulary(
            where=path,
            tokens=model.tokens,
            types=model.types,
            scores=model.scores,
            merges=[],
            bos_token_id=model.bos_token_id,
            eos_token_id=model.eos_token_id,
            add_bos=bool(settings.get("add_bos_token", True)),
            add_eos=bool(settings.get("add_eos_token", False)),
        ),
        model.add_space_prefix,
    )
    added = settings.get("added_tokens_decoder", {})
    if (
        not isinstance(added, dict)
        or len(added) > MAX_ADDED_TOKENS
        or not all(str(i).isdecimal() for i in added)
    ):
        raise CheckpointError(f"{path.parent}/tokenizer_config.json: added_tokens_decoder is damaged")
    for i, token in sorted(added.items(), key=lambda item: int(item[0])):
        text = _content(token)
        if text is None or int(i) > tokenizer.get_vocab_size():
            raise CheckpointError(
                f"{path.parent}/tokenizer_config.json: added token {i[:20]} leaves a gap before it"
            )
        flags = {k: bool(token.get(k)) for k in ("special", "normalized", "lstrip", "rstrip", "single_word")}
        tokenizer.add_tokens([AddedToken(text, **flags)])
    return tokenizer


def _special_id(
    tokenizer: "Tokenizer", settings: Mapping[str, Any], config: Mapping[str, Any], which: str
) -> int | None:
    """A special token's id: of the token that the tokenizer's files name, else what config.json says."""
    if f"{which}_token" in settings:
        text = _content(settings[f"{which}_token"])
        return None if text is None else tokenizer.token_to_id(text)
    value = config.get(f"{which}_token_id")
    if isinstance(value, list) and value:
        value = value[0]
    return value if type(value) is int and tokenizer.id_to_token(value) is not None else None


def _content(token: Any) -> str | None:
    """A token as tokenizer_config.json has it: text, or an object with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _adds_bos(tokenizer: "Tokenizer", bos: int | None) -> bool:
    """Whether encoding plain text puts BOS in front, found by doing it."""
    bare, full = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    return len(full) > len(bare) and full[0] == bos


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The template in its own file goes before the one in tokenizer_config.json; of several, the default one."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            with file.open(encoding="utf-8") as f:
                return f.read(MAX_JSON_BYTES)
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"{file}: cannot be read as text ({e})") from e
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
