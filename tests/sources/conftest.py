"""The loopback hub for these tests."""

from tests.hub.fixtures import loopback

__all__ = ["loopback"]
