"""The pass that the compiler is given: when it is put there, its name for the compiler's cache, what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch.fx import Graph

from lockstep.kernels import attention_pass, graph_pass, product_pass, products


@pytest.mark.parametrize(
    ("where", "name", "number"), [(products, "LEAST_FLOPS", 5.0), (attention_pass, "LEAST_TOKENS", 5)]
)
def test_it_is_one_of_the_compilers_and_has_a_name(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, number: float
) -> None:
    with inductor.patch(post_grad_custom_post_pass=None):
        graph_pass.install()
        ours: Any = inductor.post_grad_custom_post_pass
        graph_pass.install()
        assert inductor.post_grad_custom_post_pass is ours
    assert isinstance(ours, graph_pass.GraphPass)
    before = ours.uuid()
    assert before == graph_pass.GraphPass().uuid()
    monkeypatch.setattr(where, name, number)
    assert ours.uuid() != before
    somebodys = graph_pass.GraphPass()
    with inductor.patch(post_grad_custom_post_pass=somebodys):
        graph_pass.install()
        assert inductor.post_grad_custom_post_pass is somebodys


def test_its_name_changes_with_all_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = graph_pass.GraphPass()
    before = ours.uuid()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: -1)  # none that there is
    assert ours.uuid() != before
    names = {"products.py", "product_pass.py", "attention_pass.py", "graph_pass.py"}
    assert {Path(each).name for each in graph_pass.FILES} == names
    assert all(Path(each).is_file() for each in graph_pass.FILES)


def test_it_puts_in_products_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, Graph]] = []
    for module in (product_pass, attention_pass):
        monkeypatch.setattr(module, "put_in", lambda graph, name=module.__name__: given.append((name, graph)))
    graph = Graph()
    graph_pass.GraphPass()(graph)
    assert given == [(product_pass.__name__, graph), (attention_pass.__name__, graph)]
