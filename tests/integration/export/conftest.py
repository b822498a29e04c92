"""Fixtures of the tests that export models."""

from tests.support.compiling import fresh_compiler as fresh_compiler
