"""Fixtures of the tests that export models."""

from tests.integration.compile.conftest import fresh_compiler as fresh_compiler
