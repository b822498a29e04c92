"""Fixtures of the tests that compile models."""

from tests.support.compiling import fresh_compiler as fresh_compiler
