import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime import LLM, EngineConfig, FinishReason, GenerationRequest, SamplingParams

Make = Callable[..., Path]


def test_answers_come_in_the_order_of_the_prompts(null_engine: Make) -> None:
    prompts = [
        GenerationRequest("", prompt="p" * i, params=SamplingParams(max_tokens=40 - i)) for i in range(1, 33)
    ]
    with LLM(null_engine(), EngineConfig(max_queue_requests=None, check_integrity=True)) as llm:
        together = llm.generate(prompts)
        assert [len(o.token_ids) for o in together] == [40 - i for i in range(1, 33)]
        assert llm.engine.metrics().mean_batch > 4
        one_by_one = [llm.generate([p])[0] for p in prompts]
    assert [o.token_ids for o in together] == [o.token_ids for o in one_by_one]


def test_plain_text_takes_the_given_params(null_engine: Make) -> None:
    with LLM(null_engine()) as llm:
        outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=3))
        assert [len(o.token_ids) for o in outputs] == [3, 3]
        assert "".join(o.text for o in llm.stream("a", SamplingParams(max_tokens=3))) == outputs[0].text


def test_a_reader_that_stops_early_cancels(null_engine: Make) -> None:
    with LLM(null_engine(delay=0.005)) as llm:
        for _ in llm.stream("a", SamplingParams(max_tokens=1000)):
            break
        assert llm.generate(["b"], SamplingParams(max_tokens=2))[0].finish_reason is FinishReason.LENGTH
        assert llm.engine.metrics().used_blocks == 0
        assert llm.engine.metrics().requests_cancelled == 1


def test_a_bad_prompt_leaves_nothing_behind(null_engine: Make) -> None:
    with LLM(null_engine(delay=0.005)) as llm:
        with pytest.raises(InvalidArgument):
            llm.generate(["a", "b" * 5000], SamplingParams(max_tokens=1000))
        llm.generate(["c"], SamplingParams(max_tokens=1))
        assert llm.engine.metrics().running_requests == 0


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, trtforge.runtime as r; heavy = {'numpy', 'tokenizers', 'jinja2', 'openvino'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); r.LLM; assert 'numpy' in sys.modules; "
        "assert all(hasattr(r, n) for n in r.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
