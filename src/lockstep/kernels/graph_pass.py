"""The compiler's graphs with our kernels in them: large products and attention, each by a pass of its own.

Import this only where something is compiled: it loads the compiler.
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from lockstep.kernels import attention_pass, product_pass, products

FILES = (products.__file__, product_pass.__file__, attention_pass.__file__, __file__)


class GraphPass(CustomGraphPass):
    """Puts them in; what it does follows from its own text and cuDNN's, by which the compiler's cache knows it."""

    def __call__(self, graph: Graph) -> None:
        product_pass.put_in(graph)
        attention_pass.put_in(graph)

    def uuid(self) -> bytes:
        decide = products.LEAST_FLOPS, attention_pass.LEAST_TOKENS, torch.backends.cudnn.version()
        return get_hash_for_files(FILES, extra=" ".join(map(str, decide)))


def install() -> None:
    """For all that is compiled in this process from now on, unless somebody has a pass of their own there."""
    if inductor.post_grad_custom_post_pass is None:
        inductor.post_grad_custom_post_pass = GraphPass()
