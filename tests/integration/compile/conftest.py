"""Fixtures of the tests that compile models."""

import torch._inductor.config

from tests.support.compiling import fresh_compiler as fresh_compiler

torch._inductor.config.compile_threads = 1  # starting processes that compile would take longer than these small graphs
