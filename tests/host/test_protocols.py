"""The types of SGLang's objects (`host/worker/protocols.py`) name what SGLang's classes have."""

from __future__ import annotations

import inspect
import re

import pytest
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.host.worker import protocols

CLASSES = {
    protocols.Req: Req,
    protocols.ScheduleBatch: ScheduleBatch,
    protocols.ForwardBatch: ForwardBatch,
    protocols.LogitsOutput: LogitsProcessorOutput,
    protocols.ModelRunner: ModelRunner,
}


def members(protocol: type) -> set[str]:
    """Fields and methods; without what we set on SGLang's objects ourselves."""
    methods = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
    return {name for name in {*protocol.__annotations__, *methods} if not name.startswith("dflash_")}


def has(cls: type, name: str) -> bool:
    """Whether a class, or one that it extends, has the member, or its source assigns it to an instance."""
    if hasattr(cls, name):
        return True
    sources = [inspect.getsource(one) for one in cls.__mro__ if one is not object]
    return any(re.search(rf"\bself\.{name}\b[^=\n]*=|^    {name}:", source, re.MULTILINE) for source in sources)


@pytest.mark.parametrize("protocol", CLASSES, ids=lambda protocol: protocol.__name__)
def test_every_member_is_the_hosts(protocol: type) -> None:
    """Fails where SGLang renames what we read, or the type names what SGLang never had."""
    assert {name for name in members(protocol) if not has(CLASSES[protocol], name)} == set()


def test_a_member_that_is_not_there_is_found() -> None:
    """Fails where the test above cannot fail."""
    assert not has(Req, "no_such_member") and not has(ModelRunner, "no_such_member")
