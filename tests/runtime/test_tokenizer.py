"""Encoding by the tokenizer's own rule, and chat templates as transformers renders them."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizer_files
from transformers import PreTrainedTokenizerFast

from trtforge.plugins.errors import EngineFormatError, InvalidArgument
from trtforge.runtime.tokenizer import Tokenizer

CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "unused"}
TURNS = [
    {"role": "system", "content": "Be brief & kind."},
    {"role": "user", "content": 'Say "<hi>" — 日本語'},
    {"role": "assistant", "content": "  hi  "},
    {"role": "user", "content": "again"},
]


def make(kind: str = "byte-level", template: str | None = None, **config: Any) -> Tokenizer:
    return Tokenizer(tokenizer_files.KINDS[kind]().to_str(), {**CONFIG, **config}, template)


PART = {"type": "text", "text": "a part"}
CALL = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}
TOOL_TURNS = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "12:00", "tool_call_id": "c1", "name": None},
    {"role": "assistant", "tool_calls": [CALL], "reasoning": "hm"},
]


def bos(tokenizer: Tokenizer) -> int:
    return tokenizer.encode("")[0]


@pytest.mark.parametrize("kind", tokenizer_files.KINDS)
def test_text_gets_the_special_tokens_of_its_own_rule(kind: str) -> None:
    fast = tokenizer_files.KINDS[kind]()
    for text in ("Hello world", "", "  ", "日本語"):
        assert make(kind).encode(text) == fast.encode(text).ids
        assert (
            make(kind).encode(text, add_special_tokens=False)
            == fast.encode(text, add_special_tokens=False).ids
        )
    assert make(kind).decode(make(kind).encode("Hello world")) == "Hello world"


def test_never_two_bos() -> None:
    tokenizer = make()
    once = tokenizer.encode("Hello")
    assert tokenizer.encode("<s>Hello") == once
    assert once.count(bos(tokenizer)) == 1


def test_bos_is_added_where_only_the_config_asks_for_it() -> None:
    raw = json.loads(tokenizer_files.byte_level().to_str())
    raw["post_processor"] = None
    bare = Tokenizer(json.dumps(raw), CONFIG)
    asked = Tokenizer(json.dumps(raw), {**CONFIG, "add_bos_token": True})
    assert asked.encode("Hello") == [bos(make()), *bare.encode("Hello")]
    assert asked.encode("<s>Hello") == asked.encode("Hello")
    assert asked.encode("Hello", add_special_tokens=False) == bare.encode("Hello")


def test_lone_surrogates_are_the_callers_fault() -> None:
    with pytest.raises(InvalidArgument, match="Unicode"):
        make().encode("a\ud800b")


def test_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    tokenizer = make()
    longest = max(map(len, tokenizer._fast.get_vocab()))
    fits = "x" * (longest * 4)
    assert tokenizer.encode(fits, max_tokens=4) == tokenizer.encode(fits)  # whoever counts tokens decides
    tokenizer._fast = None  # whoever encodes fails
    with pytest.raises(InvalidArgument, match=f"the text has {longest * 4 + 1} characters; 4 tokens"):
        tokenizer.encode(fits + "x", max_tokens=4)


def test_other_threads_run_while_a_text_is_encoded() -> None:
    """The engine's among them."""
    encoder = threading.Thread(target=make().encode, args=("Hello world, " * 40_000,))
    encoder.start()
    turns = 0
    while encoder.is_alive():
        time.sleep(0.001)  # gives the interpreter away, and must get it back
        turns += 1
    assert turns > 10


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(EngineFormatError, match=r"tokenizer_config\.json: not a JSON object"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(EngineFormatError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineFormatError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


TEMPLATES = {
    "chatml": "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '</s>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "bos and trim": "{{ bos_token }}\n{%- for m in messages %}\n  {%- if m.role == 'user' %}[U] {{ m.content | trim }}"
    "\n  {%- else %} {{ m.content }}{{ eos_token }}\n  {%- endif %}\n{%- endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "break": "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "blocks on lines": "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "absent": "{% if tools %}T{% endif %}{% if documents is defined and documents %}D{% endif %}{{ messages[0].name }}",
    "date": "{{ strftime_now('%Y') }}{{ messages | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_files.byte_level(), bos_token="<s>", eos_token="</s>"
    )
    expected = reference.apply_chat_template(
        TURNS, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
    )
    tokenizer = make(template=TEMPLATES[name])
    assert tokenizer.chat_template.render(TURNS) == expected
    ids = reference.apply_chat_template(
        TURNS, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokenizer.encode_messages(TURNS) == ids


TOOL_TEMPLATES = {
    "missing": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.name }}{% endfor %}",
    "is none": "{% for m in messages %}{% if m.content is none %}NONE{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "defined": "{% for m in messages %}{{ 'content' in m }}{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "whole": "{{ messages | tojson }}",
}


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_tool_turns_render_as_in_transformers(name: str) -> None:
    template = TOOL_TEMPLATES[name]
    assert make(template=template).chat_template.render(TOOL_TURNS) == by_transformers(template, TOOL_TURNS)


LISTS = {
    "iterated": "{% for m in messages %}{% for part in m['content'] %}{{ part['type'] }}={{ part.text | trim }};"
    "{% endfor %}{% endfor %}",
    "through a variable": "{% for m in messages %}{% set content = m.content %}{% for p in content %}<{{ p.text }}>"
    "{% endfor %}{% endfor %}",
    "in a macro": "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "by index": "{% for m in messages %}{{ m.content[0].text }}{{ m.content | length }}{% endfor %}",
    "filtered": "{{ messages[0].content | map(attribute='text') | join('|') }}",
}
PARTS = [{"role": "user", "content": [PART, {"type": "text", "text": " and\nanother "}]}]


@pytest.mark.parametrize("name", LISTS)
def test_text_parts_render_as_in_transformers(name: str) -> None:
    rendered = make(template=LISTS[name]).chat_template.render(PARTS)
    assert rendered == by_transformers(LISTS[name], PARTS)
    assert "part" in rendered


@pytest.mark.parametrize("name", ["chatml", "bos and trim", "blocks on lines"])
def test_a_template_of_texts_gets_the_parts_as_one_text(name: str) -> None:
    """Python's own notation of the list, or nothing at all, is what transformers makes of it."""
    joined = [{"role": "user", "content": "a part and\nanother "}]
    rendered = make(template=TEMPLATES[name]).chat_template.render(PARTS)
    assert rendered == by_transformers(TEMPLATES[name], joined)


def by_transformers(template: str, turns: list[dict[str, Any]]) -> str:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_files.byte_level(), bos_token="<s>", eos_token="</s>"
    )
    return str(
        reference.apply_chat_template(
            turns, chat_template=template, add_generation_prompt=True, tokenize=False
        )
    )


def test_a_template_that_brings_its_bos_gets_no_other() -> None:
    tokenizer = make(template=TEMPLATES["bos and trim"])
    assert tokenizer.encode_messages(TURNS).count(bos(tokenizer)) == 1


def test_what_a_template_refuses_is_said_in_its_own_words() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('the user must begin') }}{% endif %}"
    with pytest.raises(InvalidArgument, match="the user must begin"):
        make(template=template).encode_messages(TURNS)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.at_all }}",
    ],
)
def test_a_template_is_held_in_its_sandbox(template: str) -> None:
    with pytest.raises(InvalidArgument, match="template"):
        make(template=template).encode_messages(TURNS)


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hello"], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([TURNS[0], {"role": 3, "content": "x"}], r"messages\[1\]\.role"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": []}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text"),
        (
            [{"role": "user", "content": [PART, {"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\]\.content\[1\]: 'image_url' parts are not supported",
        ),
    ],
    ids=str,
)
def test_messages_that_are_no_turns_are_refused_by_place(messages: Any, where: str) -> None:
    with pytest.raises(InvalidArgument, match=where):
        make(template=TEMPLATES["chatml"]).encode_messages(messages)


def test_no_template_is_said() -> None:
    with pytest.raises(
        InvalidArgument, match="no chat template; give its prompt as plain text, without --chat or messages"
    ):
        make().encode_messages(TURNS)


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ x | nothing }}",
        "{% for m in messages %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 5000,
    ],
    ids=["syntax", "filter", "too many blocks", "too deep"],
)
def test_a_broken_template_is_as_none(template: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"chat template does not parse .*; give its prompt as plain text"
    ):
        make(template=template).encode_messages(TURNS)
